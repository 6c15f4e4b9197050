//! Starts a child of the keeper, by `posix_spawn` or in the keeper's sandbox, with exactly the given descriptors,
//! environment and directory. It knows nothing about turns, and nothing about a child once it runs.

use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use qd_sandbox::ConfinedProgram;

use crate::confinement::KeeperConfinement;
use crate::wire::{DESCRIPTORS, LaunchSpec};

/// The search path if the child's environment has no `PATH`.
const DEFAULT_PATH: &str = "/usr/local/bin:/usr/bin:/bin";

#[derive(Debug, thiserror::Error)]
pub(crate) enum LaunchError {
    #[error("the command is empty; there is no program to start")]
    Empty,
    #[error("the command came without descriptors for standard input, output and error")]
    NoDescriptors,
    #[error("{0} was not found")]
    NotFound(String),
    #[error("the directory {0} does not exist")]
    NoFolder(PathBuf),
    #[error("{0} could not be started: {1}")]
    Refused(String, io::Error),
}

/// Starts a program, in the sandbox if there is one, and returns its pid.
pub(crate) fn launch(
    launch: &LaunchSpec,
    descriptors: [OwnedFd; DESCRIPTORS],
    confinement: Option<&mut KeeperConfinement>,
) -> Result<u32, LaunchError> {
    let (name, arguments) = launch.argv.split_first().ok_or(LaunchError::Empty)?;
    if !launch.cwd.is_dir() {
        return Err(LaunchError::NoFolder(launch.cwd.clone()));
    }
    let path = launch.env.get("PATH").map_or(DEFAULT_PATH, String::as_str);
    let program = find_program(name, path, &launch.cwd).ok_or_else(|| LaunchError::NotFound(name.clone()))?;
    let refused = |error| LaunchError::Refused(name.clone(), error);
    let arg0 = launch.arg0.as_ref().unwrap_or(name);
    if let Some(confinement) = confinement {
        let program = ConfinedProgram {
            path: program,
            arguments: std::iter::once(arg0).chain(arguments).cloned().collect(),
            env: launch.env.clone(),
            cwd: launch.cwd.clone(),
        };
        return confinement.spawn(&program, &descriptors).map_err(refused);
    }
    let [stdin, stdout, stderr] = descriptors.map(Stdio::from);
    // The program is given by its full path: with a changed `PATH`, `Command` would have to fork instead of using the
    // faster `posix_spawn`.
    let child = Command::new(program)
        .arg0(arg0)
        .args(arguments)
        .env_clear()
        .envs(&launch.env)
        .current_dir(&launch.cwd)
        .stdin(stdin)
        .stdout(stdout)
        .stderr(stderr)
        // A group of its own, or a child that signals its group would hit the keeper.
        .process_group(0)
        .spawn()
        .map_err(refused)?;
    Ok(child.id())
}

/// Finds a program like a shell, but resolves relative paths from the child's directory.
fn find_program(name: &str, path: &str, cwd: &Path) -> Option<PathBuf> {
    let is_program = |file: &PathBuf| {
        file.metadata().is_ok_and(|metadata| metadata.is_file() && metadata.permissions().mode() & 0o111 != 0)
    };
    if name.contains('/') {
        let file = cwd.join(name);
        // A file that exists but is not executable fails later, with a better error message.
        return file.exists().then_some(file);
    }
    let directories = std::env::split_paths(OsStr::new(path));
    directories.map(|directory| cwd.join(directory).join(name)).find(is_program)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_program_is_found_on_the_childs_path_from_the_childs_folder() {
        let directory = tempfile::tempdir().unwrap();
        let bin = directory.path().join("bin");
        fs::create_dir(&bin).unwrap();
        let program = bin.join("agent");
        fs::write(&program, "").unwrap();
        assert_eq!(find_program("agent", "bin", directory.path()), None, "not executable yet");
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(find_program("agent", "none:bin", directory.path()), Some(program.clone()));
        assert_eq!(find_program("bin/agent", "", directory.path()), Some(program.clone()));
        assert_eq!(find_program(program.to_str().unwrap(), "", Path::new("/")), Some(program));
        assert_eq!(find_program("bin", "", directory.path()), None, "a directory is not a program");
        assert_eq!(find_program("./nobody", "bin", directory.path()), None);
    }
}
