//! How a keeper starts a child: by `posix_spawn`, with exactly the descriptors, environment and folder it was given. It
//! knows nothing of turns, and of no child once it runs.

use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::wire::{DESCRIPTORS, LaunchSpec};

/// Where a program is looked for if its environment has no `PATH`.
const DEFAULT_PATH: &str = "/usr/local/bin:/usr/bin:/bin";

/// Why a program could not be started.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LaunchError {
    #[error("there is nothing to start: the command is empty")]
    Empty,
    #[error("its standard input, output and error did not come with it")]
    NoDescriptors,
    #[error("{0} was not found")]
    NotFound(String),
    #[error("the folder {0} does not exist")]
    NoFolder(PathBuf),
    #[error("{0} could not be started: {1}")]
    Refused(String, io::Error),
}

/// Starts a program and gives its pid.
pub(crate) fn launch(launch: &LaunchSpec, descriptors: [OwnedFd; DESCRIPTORS]) -> Result<u32, LaunchError> {
    let (name, arguments) = launch.argv.split_first().ok_or(LaunchError::Empty)?;
    if !launch.cwd.is_dir() {
        return Err(LaunchError::NoFolder(launch.cwd.clone()));
    }
    let path = launch.env.get("PATH").map_or(DEFAULT_PATH, String::as_str);
    let program = find_program(name, path, &launch.cwd).ok_or_else(|| LaunchError::NotFound(name.clone()))?;
    let [stdin, stdout, stderr] = descriptors.map(Stdio::from);
    // The program by its whole path: a search in a changed `PATH` would cost us the fast way to start it.
    let child = Command::new(program)
        .arg0(launch.arg0.as_ref().unwrap_or(name))
        .args(arguments)
        .env_clear()
        .envs(&launch.env)
        .current_dir(&launch.cwd)
        .stdin(stdin)
        .stdout(stdout)
        .stderr(stderr)
        // Else a child that signals its own group would hit its keeper.
        .process_group(0)
        .spawn()
        .map_err(|error| LaunchError::Refused(name.clone(), error))?;
    Ok(child.id())
}

/// A program as a shell would find it, but that names and places are seen from the child's folder.
fn find_program(name: &str, path: &str, cwd: &Path) -> Option<PathBuf> {
    let is_program = |file: &PathBuf| {
        file.metadata().is_ok_and(|about| about.is_file() && about.permissions().mode() & 0o111 != 0)
    };
    if name.contains('/') {
        let file = cwd.join(name);
        // What is there and no program is an error with a better text.
        return file.exists().then_some(file);
    }
    let folders = std::env::split_paths(OsStr::new(path));
    folders.map(|folder| cwd.join(folder).join(name)).find(is_program)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_program_is_found_on_the_childs_path_from_the_childs_folder() {
        let folder = tempfile::tempdir().unwrap();
        let bin = folder.path().join("bin");
        fs::create_dir(&bin).unwrap();
        let program = bin.join("agent");
        fs::write(&program, "").unwrap();
        assert_eq!(find_program("agent", "bin", folder.path()), None, "it is not executable yet");
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(find_program("agent", "none:bin", folder.path()), Some(program.clone()));
        assert_eq!(find_program("bin/agent", "", folder.path()), Some(program.clone()));
        assert_eq!(find_program(program.to_str().unwrap(), "", Path::new("/")), Some(program));
        assert_eq!(find_program("bin", "", folder.path()), None, "a folder is no program");
        assert_eq!(find_program("./nobody", "bin", folder.path()), None);
    }
}
