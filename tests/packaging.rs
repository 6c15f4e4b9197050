//! What packages need of the program and of the files in `packaging/`, as far as it can be checked without building one:
//! names, man pages, completions, the systemd unit and the npm launcher. `packaging/test` builds and installs the real
//! packages.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use qd_testkit::home::binary;
use qd_testkit::{TestCommand, TestHome, poll_until};

fn packaging() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging")
}

fn manifest() -> toml::Table {
    include_str!("../crates/cli/Cargo.toml").parse().unwrap()
}

/// The files that the .deb consists of, each with its destination.
fn deb_assets() -> Vec<(String, String)> {
    let assets = manifest()["package"]["metadata"]["deb"]["assets"].as_array().unwrap().clone();
    let text = |value: &toml::Value| value.as_str().unwrap().to_owned();
    assets.iter().map(|asset| (text(&asset[0]), text(&asset[1]))).collect()
}

/// The command of the unit, as systemd gives it to the shell.
fn unit_shell_line() -> String {
    let unit = std::fs::read_to_string(packaging().join("quarterdeck.service")).unwrap();
    let command = unit.lines().find_map(|line| line.strip_prefix("ExecStart=/bin/sh -c '")).unwrap();
    command.strip_suffix('\'').unwrap().replace("$$", "$")
}

#[test]
fn the_package_is_quarterdeck_and_its_program_is_qd() {
    let manifest = manifest();
    assert_eq!(manifest["package"]["name"].as_str(), Some("quarterdeck"));
    assert_eq!(manifest["bin"][0]["name"].as_str(), Some("qd"));
}

#[test]
fn a_build_needs_no_settings_of_cargo_that_an_installation_from_git_does_not_read() {
    let settings = std::fs::read_to_string(packaging().join("../.cargo/config.toml")).unwrap_or_default();
    let settings: toml::Table = settings.parse().unwrap();
    for key in ["build", "env", "profile", "target"] {
        assert!(!settings.contains_key(key), "cargo install --git does not read .cargo/config.toml: [{key}]");
    }
}

#[test]
fn every_file_of_the_deb_is_in_the_repository_or_is_written_by_the_script() {
    let crate_folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    for (source, _) in deb_assets() {
        let is_written = source.contains("target/");
        assert!(is_written || crate_folder.join(&source).is_file(), "{source}");
    }
    let destinations: Vec<String> = deb_assets().into_iter().map(|(_, destination)| destination).collect();
    for folder in ["usr/bin/", "usr/share/man/man1/", "usr/lib/systemd/user/"] {
        assert!(destinations.iter().any(|destination| destination == folder), "{folder}");
    }
}

#[tokio::test]
async fn every_command_has_a_man_page_and_every_shell_its_completions() {
    let home = TestHome::new();
    let pages = home.sibling_path("man1");
    home.qd(&["man", pages.to_str().unwrap()]).await.ok();
    let help = home.qd(&["--help"]).await.ok();
    assert!(help.contains("qd run"), "{help}");
    for page in ["qd.1", "qd-run.1", "qd-serve.1", "qd-asks.1"] {
        let text = std::fs::read_to_string(pages.join(page)).unwrap();
        assert!(text.contains(".TH"), "{page}: {text}");
    }
    for (shell, mark) in [("bash", "complete -F"), ("zsh", "#compdef qd"), ("fish", "complete --command qd")]
    {
        let script = home.qd(&["completions", shell]).await.ok();
        assert!(script.contains(mark), "{shell}: {script}");
    }
}

#[tokio::test]
async fn the_unit_finds_a_program_that_cargo_installed() {
    let home = TestHome::new();
    let folder = home.sibling_path("user/.cargo/bin");
    std::fs::create_dir_all(&folder).unwrap();
    symlink(binary(), folder.join("qd")).unwrap();
    let mut command = home.program("/bin/sh");
    command.args(["-c", &unit_shell_line()]).env("PATH", "/usr/bin:/bin");
    let daemon = TestCommand::spawn(command);
    poll_until("a daemon", async || home.daemon_pid().is_some().then_some(())).await;
    assert_eq!(home.daemon_pid(), Some(daemon.pid()), "the daemon is the process that systemd started");
}

#[tokio::test]
async fn the_unit_gives_up_with_127_if_there_is_no_program() {
    let home = TestHome::new();
    let mut command = home.program("/bin/sh");
    command.args(["-c", &unit_shell_line()]).env("PATH", "/nowhere");
    let output = TestCommand::spawn(command).wait().await;
    assert_eq!(output.code, Some(127));
    let unit = std::fs::read_to_string(packaging().join("quarterdeck.service")).unwrap();
    assert!(unit.contains("RestartPreventExitStatus=1 2 127"));
}

#[tokio::test]
async fn the_npm_launcher_becomes_the_program_of_this_processor() {
    let home = TestHome::new();
    let modules = home.sibling_path("project/node_modules");
    let cpu = if cfg!(target_arch = "aarch64") { "arm64" } else { "x64" };
    let platform = modules.join(format!("@quarterdeck/linux-{cpu}/bin"));
    for folder in [&platform, &modules.join("quarterdeck/bin"), &modules.join(".bin")] {
        std::fs::create_dir_all(folder).unwrap();
    }
    std::fs::copy(packaging().join("npm/launcher"), modules.join("quarterdeck/bin/qd")).unwrap();
    symlink("../quarterdeck/bin/qd", modules.join(".bin/qd")).unwrap();
    let mut run = home.program(modules.join(".bin/qd"));
    run.arg("--version");
    let output = TestCommand::spawn(run).wait().await;
    assert_eq!(output.code, Some(1));
    assert!(output.stderr.contains("--omit=optional"), "{output:?}");

    symlink(binary(), platform.join("qd")).unwrap();
    let mut run = home.program(modules.join(".bin/qd"));
    run.arg("--version");
    let shown = TestCommand::spawn(run).wait().await.ok();
    assert_eq!(shown.trim(), concat!("qd ", env!("CARGO_PKG_VERSION")));
}
