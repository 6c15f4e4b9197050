//! Programs that resist being killed, as an agent's tools may start them: six kinds, each of which ignores every
//! polite signal and has lost its parent. They are written in Python, so that their system calls are easy to see.

use serde_json::Value;

use crate::home::TestHome;
use crate::{poll_until, script};

pub const KINDS: [&str; 6] =
    ["setsid", "double_fork", "ignores_sigterm", "stops_itself", "fork_storm", "grandchild"];

const PROGRAM: &str = include_str!("escapees.py");

/// A step of `script` that starts `count` processes of a kind.
pub fn spawn_step(home: &TestHome, kind: &str, count: usize) -> Value {
    let (program, folder) = (home.sibling_path("escapees.py"), home.sibling_path("escaped"));
    std::fs::write(&program, PROGRAM).expect("the directory can be written");
    std::fs::create_dir_all(&folder).expect("the directory can be written");
    let path = |path: std::path::PathBuf| path.to_str().expect("a plain name").to_owned();
    let (program, folder) = (path(program), path(folder));
    script::spawn(&["python3", "-I", "-S", &program, kind, &count.to_string(), &folder])
}

/// Waits until `count` processes of a kind are ready, among all that were started in this home.
pub async fn wait_until_ready(home: &TestHome, kind: &str, count: usize) {
    let folder = home.sibling_path("escaped");
    poll_until(&format!("{count} times {kind}"), async || {
        let names = std::fs::read_dir(&folder).expect("the directory is there").flatten();
        let of_kind =
            names.filter(|entry| entry.file_name().to_string_lossy().starts_with(&format!("{kind}.")));
        (of_kind.count() >= count).then_some(())
    })
    .await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn each_kind_gets_loose_and_is_found_by_its_home_and_ends_with_it() {
        let home = TestHome::new();
        for kind in KINDS {
            let step = spawn_step(&home, kind, 2);
            let argv: Vec<_> = step["spawn"]["argv"].as_array().into_iter().flatten().collect();
            let argv: Vec<_> = argv.into_iter().filter_map(Value::as_str).collect();
            let mut program = home.program(argv[0]);
            program.args(&argv[1..]);
            // Kept until then, because dropping it kills the program, which may have just started.
            let started = crate::TestCommand::spawn(program);
            wait_until_ready(&home, kind, 2).await;
            drop(started);
        }
        let directory = home.sibling_path("escaped");
        for kind in KINDS {
            let found = home.processes();
            let alive = found.iter().filter(|process| process.args.iter().any(|arg| arg == kind)).count();
            assert!(alive >= 1, "{kind}: {found:#?}");
        }
        drop(home);
        let name = directory.display().to_string();
        let is_left = || crate::processes::all_processes().iter().any(|process| process.args.contains(&name));
        poll_until("the end of the escapees", async || (!is_left()).then_some(())).await;
    }
}
