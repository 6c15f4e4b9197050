//! Finds an agent's program and its version. Finding the version means running the program, which may take seconds,
//! so the result is cached for as long as the file stays the same.

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsString;
use std::io::Read;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use qd_protocol::manifest::Manifest;
use regex::Regex;

/// The placeholder for this program in a manifest's command.
pub const SELF_PROGRAM: &str = "{qd}";
/// How long a program may take to print its version.
const VERSION_TIMEOUT: Duration = Duration::from_secs(20);
/// How much output is read for the version, in bytes.
const VERSION_OUTPUT_MAX: u64 = 64 << 10;
/// The pause between two polls of the output.
const VERSION_POLL: Duration = Duration::from_millis(10);
/// Where programs are searched if there is no `PATH`.
const DEFAULT_PATH: &str = "/usr/local/bin:/usr/bin:/bin";

/// The path of the agent's program, if it is installed.
pub fn find_program(manifest: &Manifest) -> Option<PathBuf> {
    let command = manifest.command();
    let name = command.first()?;
    if name == SELF_PROGRAM {
        return std::env::current_exe().ok();
    }
    let in_listed_places =
        || manifest.agent.places.iter().map(|place| expand_home(place)).find(|path| is_program(path));
    find_on_path(name).or_else(|| in_listed_places().filter(|_| *name == manifest.agent.binary))
}

/// The name under which the agent's program is searched in the `PATH`; `None` if nothing is searched.
pub fn searched_name(manifest: &Manifest) -> Option<String> {
    let name = manifest.command().into_iter().next()?;
    let is_searched = manifest.driver().has_program() && name != SELF_PROGRAM && !name.contains('/');
    is_searched.then_some(name)
}

/// Says in which folders the agent's program is searched, for an error message.
pub fn searched_places(manifest: &Manifest) -> String {
    let Some(name) = searched_name(manifest) else {
        return manifest.command().into_iter().next().unwrap_or_default();
    };
    let path = std::env::var("PATH").unwrap_or_else(|_| DEFAULT_PATH.to_owned());
    let places = manifest.agent.places.iter().filter(|_| name == manifest.agent.binary);
    let places: String = places.map(|place| format!(", {place}")).collect();
    format!("`{name}` in the daemon's PATH ({path}){places}")
}

/// The manifest with this program, which somebody else has found. Its folder comes first in the agent's `PATH`, because
/// what its first line needs (`node`) is often installed beside it. A program that is gone is not used.
#[must_use]
pub fn with_given_program(mut manifest: Manifest, program: &Path) -> Manifest {
    let (Some(path), Some(folder)) = (program.to_str(), program.parent()) else { return manifest };
    if !is_program(program) || !manifest.driver().has_program() {
        return manifest;
    }
    let mut command = manifest.command();
    if let Some(name) = command.first_mut() {
        path.clone_into(name);
    }
    let usual = std::env::var_os("PATH").unwrap_or_else(|| DEFAULT_PATH.into());
    let folders = std::iter::once(folder.to_owned()).chain(std::env::split_paths(&usual));
    if let Ok(Ok(folders)) = std::env::join_paths(folders).map(OsString::into_string) {
        manifest.startup.env.entry("PATH".to_owned()).or_insert(folders);
    }
    with_command(manifest, command)
}

/// The manifest with the path of its program filled in, so that starting it needs no search. A manifest whose program
/// is not found is left as it is: the start reports the better error.
#[must_use]
pub fn with_program_path(manifest: Manifest) -> Manifest {
    if !manifest.driver().has_program() {
        return manifest;
    }
    let mut command = manifest.command();
    if command.first().is_some_and(|name| name != SELF_PROGRAM)
        && let Some(found) = find_program(&manifest)
        && let Some(path) = found.to_str()
    {
        command[0] = path.to_owned();
    }
    with_command(manifest, command)
}

/// The manifest with this command, whichever part of it the command came from.
fn with_command(mut manifest: Manifest, command: Vec<String>) -> Manifest {
    manifest.agent.driver = Some(manifest.driver());
    manifest.fast_path.acp_stdio = None;
    manifest.fast_path.stream_json = None;
    manifest.startup.command = command;
    manifest
}

/// The manifest of an isolated agent, with its variables pointing into a folder below this one, so that the agent
/// does not use the user's own login and settings. Other manifests are left as they are.
#[must_use]
pub fn with_isolation(mut manifest: Manifest, below: &Path) -> Manifest {
    if manifest.startup.isolated {
        for (variable, place) in &manifest.startup.isolation {
            let folder = below.join(&manifest.agent.name).join(place);
            // If the folder cannot be created, the agent that needs it reports the better error.
            let _made = std::fs::create_dir_all(&folder);
            manifest.startup.env.insert(variable.clone(), folder.display().to_string());
        }
    }
    manifest
}

/// The program of this name in the `PATH` of this process, or the program at this path.
pub fn find_on_path(name: &str) -> Option<PathBuf> {
    if name.contains('/') {
        return Some(expand_home(name)).filter(|path| is_program(path));
    }
    let path = std::env::var_os("PATH").unwrap_or_else(|| DEFAULT_PATH.into());
    std::env::split_paths(&path).map(|folder| folder.join(name)).find(|path| is_program(path))
}

fn expand_home(place: &str) -> PathBuf {
    match (place.strip_prefix("~/"), std::env::var_os("HOME")) {
        (Some(rest), Some(home)) => PathBuf::from(home).join(rest),
        _ => PathBuf::from(place),
    }
}

/// Whether the path leads to a file that somebody may execute.
pub fn is_program(path: &Path) -> bool {
    path.metadata().is_ok_and(|about| about.is_file() && about.permissions().mode() & 0o111 != 0)
}

/// The versions of programs that have been probed.
#[derive(Debug, Default)]
pub struct ProgramVersions(Mutex<HashMap<PathBuf, KnownVersion>>);

#[derive(Debug, Clone)]
struct KnownVersion {
    /// Identifies the file that was probed; a different file under the same path is probed again.
    file: (u64, u64, i64, u64),
    version: Option<String>,
}

impl ProgramVersions {
    /// A program's version, if it has been probed and was found.
    pub fn version_of(&self, program: &Path) -> Option<String> {
        let file = file_identity(program)?;
        self.0.lock().get(program).filter(|known| known.file == file)?.version.clone()
    }

    /// Probes every program whose version is not known, all at once. Blocks until the slowest one is done, up to
    /// `VERSION_TIMEOUT`.
    pub fn probe_all(&self, manifests: &[Manifest]) {
        let unknown = manifests.iter().filter_map(|manifest| {
            let program = find_program(manifest).filter(|_| !manifest.agent.binary.is_empty())?;
            let file = file_identity(&program)?;
            let is_known = self.0.lock().get(&program).is_some_and(|known| known.file == file);
            (!is_known).then_some((manifest, program, file))
        });
        let unknown: Vec<_> = unknown.collect();
        std::thread::scope(|scope| {
            for (manifest, program, file) in unknown {
                scope.spawn(move || {
                    let version = probe_version(manifest, &program);
                    self.0.lock().insert(program, KnownVersion { file, version });
                });
            }
        });
    }
}

fn file_identity(program: &Path) -> Option<(u64, u64, i64, u64)> {
    let about = program.metadata().ok()?;
    Some((about.dev(), about.ino(), about.mtime(), about.size()))
}

fn probe_version(manifest: &Manifest, program: &Path) -> Option<String> {
    let probe = &manifest.probe;
    let arguments = probe.command.get(1..).map_or_else(|| vec!["--version".to_owned()], <[String]>::to_vec);
    let output = program_output(program, &arguments, &manifest.startup.env)?;
    let pattern = probe.version_pattern.as_deref().unwrap_or(r"\d+\.\d+[\w.+-]*");
    let found = Regex::new(pattern).ok()?.captures(&output)?;
    let version = found.get(1).or_else(|| found.get(0))?;
    Some(version.as_str().trim_end_matches('.').to_owned())
}

/// The standard output of a program, within the limits on time and size.
fn program_output(program: &Path, arguments: &[String], env: &BTreeMap<String, String>) -> Option<String> {
    let child = Command::new(program)
        .args(arguments)
        .envs(env)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .ok()?;
    let mut child = KillOnDrop(child);
    let stdout = child.0.stdout.take()?;
    let reader = std::thread::spawn(move || {
        let mut text = Vec::new();
        // On an error, use what was read so far.
        let _read = stdout.take(VERSION_OUTPUT_MAX).read_to_end(&mut text);
        text
    });
    let until = Instant::now() + VERSION_TIMEOUT;
    while !reader.is_finished() {
        if Instant::now() > until {
            return None;
        }
        std::thread::sleep(VERSION_POLL);
    }
    reader.join().ok().map(|text| String::from_utf8_lossy(&text).into_owned())
}

/// Kills the child when dropped, so that it does not outlive the probe.
struct KillOnDrop(Child);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        // Usually the program has already exited.
        let _killed = self.0.kill();
        let _status = self.0.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent_name::manifest_from_name;

    fn script(folder: &Path, name: &str, text: &str) -> PathBuf {
        let path = folder.join(name);
        std::fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    fn manifest(program: &Path) -> Manifest {
        manifest_from_name(&format!("acp:{} serve", program.display())).unwrap()
    }

    #[test]
    fn a_version_is_probed_once_and_again_when_the_program_has_changed() {
        let folder = tempfile::tempdir().unwrap();
        let program =
            script(folder.path(), "agent", "echo asked >> asked; echo 'agent version 1.2.3-beta (x)'");
        let text = std::fs::read_to_string(&program).unwrap();
        std::fs::write(
            &program,
            text.replace("asked;", &format!("{};", folder.path().join("asked").display())),
        )
        .unwrap();
        let (versions, agent) = (ProgramVersions::default(), manifest(&program));
        assert_eq!(versions.version_of(&program), None);
        versions.probe_all(std::slice::from_ref(&agent));
        versions.probe_all(std::slice::from_ref(&agent));
        assert_eq!(versions.version_of(&program).as_deref(), Some("1.2.3-beta"));
        assert_eq!(std::fs::read_to_string(folder.path().join("asked")).unwrap(), "asked\n");
        script(folder.path(), "agent", "echo 20.0.1");
        versions.probe_all(&[agent]);
        assert_eq!(versions.version_of(&program).as_deref(), Some("20.0.1"));
    }

    #[test]
    fn a_program_that_is_found_is_named_by_its_path_and_any_other_is_left_alone() {
        let found = with_program_path(manifest_from_name("acp:sh -c x").unwrap());
        assert!(
            found.command()[0].ends_with("/sh") && found.command()[0].starts_with('/'),
            "{:?}",
            found.command()
        );
        let absent = manifest_from_name("acp:there-is-no-such-agent --x").unwrap();
        assert_eq!(find_program(&absent), None);
        assert_eq!(with_program_path(absent).command(), ["there-is-no-such-agent", "--x"]);
    }

    #[test]
    fn a_program_is_also_searched_in_the_places_of_its_manifest() {
        let folder = tempfile::tempdir().unwrap();
        let there = script(folder.path(), "qd-test-hidden-agent", "");
        let mut agent = manifest_from_name("acp:qd-test-hidden-agent").unwrap();
        assert_eq!(find_program(&agent), None);
        agent.agent.places = vec![there.display().to_string()];
        assert_eq!(find_program(&agent), Some(there));
    }
}
