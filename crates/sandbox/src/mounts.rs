//! The files that a sandbox sees, made of mounts in a namespace of its own. The steps are collected first, and everything
//! that stays visible is opened before anything is hidden. Then the steps are taken from the root downwards, so that a
//! path below a hidden one can come back.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt};
use std::path::{Path, PathBuf};

use qd_protocol::sandbox::SandboxLevel;
use rustix::fs::{CWD, FileType, fstat};
use rustix::mount::{
    MountFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags, mount, mount_bind,
    mount_bind_recursive, mount_change, move_mount, open_tree,
};

use crate::kernel::{MountScope, set_mount_read_only};
use crate::plan::SandboxPlan;

/// What root could use to change the machine around its own files: kernel settings, which can name programs that the
/// kernel starts outside. A part of `/proc` that is covered also keeps root from mounting another `/proc`.
const KERNEL_SETTINGS: [&str; 3] = ["/proc/sys", "/proc/sysrq-trigger", "/sys"];
/// Devices that bypass the file system, besides the disks.
const RAW_MEMORY: [&str; 3] = ["/dev/mem", "/dev/kmem", "/dev/port"];
/// Files of root that ssh reads only if they belong to root or to the user. For an ordinary user in a user namespace they
/// belong to neither.
const SSH_CONFIGURATION: &str = "/etc/ssh/ssh_config.d";

/// Where services have their sockets. What appears here after the start of a sandbox is not seen inside: a socket through
/// which programs are started could be among it, such as that of Docker after an update.
const SERVICE_DIRECTORY: &str = "/run";
/// How often something is mounted on a path that was missing or is being replaced.
const MOUNT_ATTEMPTS: u32 = 10;
/// What cron and at run by themselves. Ordinary users need the help of programs that gain rights, which do not work inside.
const SCHEDULES: [&str; 9] = [
    "/etc/anacrontab",
    "/etc/cron.d",
    "/etc/cron.daily",
    "/etc/cron.hourly",
    "/etc/cron.monthly",
    "/etc/cron.weekly",
    "/etc/crontab",
    "/var/spool/at",
    "/var/spool/cron",
];

/// A mount that failed, and where.
#[derive(Debug, thiserror::Error)]
#[error("failed to mount {path}: {source}")]
pub(crate) struct MountError {
    pub(crate) path: PathBuf,
    #[source]
    pub(crate) source: io::Error,
}

/// What becomes of one path.
#[derive(Debug)]
enum MountStep {
    /// An empty directory that nobody can write.
    HideDirectory,
    /// An empty directory of the sandbox's own.
    PrivateDirectory,
    /// An empty directory that gets copies of files, so that they belong to the user, and that nobody can write.
    CopiedDirectory(Vec<(PathBuf, Vec<u8>)>),
    /// What was there before the sandbox.
    Keep { tree: OwnedFd, is_directory: bool, access: KeptAccess },
    /// What is there, but nobody can write it. Nothing above it is hidden.
    Protect,
    /// An empty file.
    HideFile,
    /// A symbolic link in a hidden or private directory.
    Link { target: PathBuf },
}

/// Who can write what is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum KeptAccess {
    /// Whoever could before.
    AsBefore,
    /// The agent can, although everything else is read-only.
    Writable,
    ReadOnly,
}

/// Changes this process's own view of the files to that of the plan. The process must be in a new mount namespace and a
/// new PID namespace, and have all rights over them.
pub(crate) fn mount_all(plan: &SandboxPlan) -> Result<(), MountError> {
    let root = Path::new("/");
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)
        .map_err(|source| failed(root, source))?;
    let steps = MountSteps::collect(plan)?;
    let is_workspace = plan.level == SandboxLevel::Workspace;
    if is_workspace {
        set_mount_read_only(CWD, root, true, MountScope::WithAllBelow)
            .map_err(|source| failed(root, source))?;
    }
    steps.apply()?;
    if is_workspace {
        mount_terminals()?;
    }
    mount_proc()?;
    if rustix::process::geteuid().is_root() {
        for path in KERNEL_SETTINGS.map(Path::new).into_iter().filter(|path| path.exists()) {
            protect(path).map_err(|source| failed(path, source))?;
        }
    }
    Ok(())
}

/// A new `/proc`, which shows the processes of the sandbox alone.
fn mount_proc() -> Result<(), MountError> {
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    mount("proc", "/proc", "proc", flags, None).map_err(|source| failed(Path::new("/proc"), source))
}

/// New terminals, which are those of the sandbox alone. Whoever writes to a terminal outside can set its clipboard, or change
/// what its user sees. A terminal that the agent was started with stays usable, but has no path inside.
fn mount_terminals() -> Result<(), MountError> {
    let path = Path::new("/dev/pts");
    if !path.is_dir() {
        return Ok(());
    }
    let flags = MountFlags::NOSUID | MountFlags::NOEXEC;
    mount("devpts", path, "devpts", flags, Some(c"newinstance,ptmxmode=0666,mode=0620"))
        .map_err(|source| failed(path, source))
}

/// The steps by path: a path is always after those above it.
#[derive(Debug, Default)]
struct MountSteps(BTreeMap<PathBuf, MountStep>);

impl MountSteps {
    /// Later steps replace earlier ones of the same path: what is kept is kept even if it would be hidden.
    fn collect(plan: &SandboxPlan) -> Result<Self, MountError> {
        let mut steps = Self::default();
        let is_workspace = plan.level == SandboxLevel::Workspace;
        for path in &plan.private_directories {
            // It may be made later, by a program outside, and would then be seen.
            if path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"tmux-")) {
                let _exists = fs::DirBuilder::new().mode(0o700).create(path);
            }
            steps.add_directory(path, MountStep::PrivateDirectory);
        }
        steps.keep_services(is_workspace);
        steps.add_directory(&plan.home, MountStep::HideDirectory);
        for path in &plan.hidden_files {
            steps.add(path, MountStep::HideFile);
        }
        for path in &plan.credentials {
            match path.is_dir() {
                true => steps.add_directory(path, MountStep::HideDirectory),
                false => steps.add(path, MountStep::HideFile),
            }
        }
        if rustix::process::geteuid().is_root() {
            RAW_MEMORY.map(Path::new).into_iter().for_each(|path| steps.add(path, MountStep::HideFile));
            steps.0.extend(block_devices().into_iter().map(|path| (path, MountStep::HideFile)));
            // At `workspace` they are read-only like everything else.
            for path in SCHEDULES.map(Path::new).into_iter().filter(|_| !is_workspace) {
                steps.add(path, MountStep::Protect);
            }
        } else {
            steps.copy_ssh_configuration();
        }
        if is_workspace {
            // What has an extension is a file, and its program knows what to write to it.
            let directories = plan.writable.iter().filter(|path| path.extension().is_none());
            directories.for_each(|path| drop(fs::create_dir_all(path)));
            steps.keep(Path::new("/dev"), KeptAccess::Writable)?;
        }
        steps.keep_all(plan)?;
        if is_workspace {
            steps.protect_repository(&plan.workspace)?;
        }
        steps.add_links(plan);
        Ok(steps)
    }

    /// Keeps what the plan names. At `deck` only what is below a hidden directory needs it. The home as a whole is never
    /// kept, even if it is the agent's own directory.
    fn keep_all(&mut self, plan: &SandboxPlan) -> Result<(), MountError> {
        let is_workspace = plan.level == SandboxLevel::Workspace;
        let home = fs::canonicalize(&plan.home).ok();
        let hidden: Vec<PathBuf> = self.0.keys().cloned().collect();
        let own = if is_workspace { KeptAccess::Writable } else { KeptAccess::AsBefore };
        let writable = plan.writable.iter().map(|path| (path, own));
        let readable = plan.readable.iter().map(|path| (path, KeptAccess::ReadOnly));
        for (named, access) in writable.chain(readable) {
            let Ok(path) = fs::canonicalize(named) else { continue };
            let is_hidden = hidden.iter().any(|hidden| path.starts_with(hidden));
            let is_home = Some(&path) == home.as_ref();
            if !is_home && (is_workspace || is_hidden) && !leads_into_hidden(plan, named, &path) {
                self.keep(&path, access)?;
            }
        }
        Ok(())
    }

    /// Keeps what the directory of services has now, unless something else becomes of it.
    fn keep_services(&mut self, is_workspace: bool) {
        let Ok(services) = fs::canonicalize(SERVICE_DIRECTORY) else { return };
        let Ok(entries) = fs::read_dir(&services) else { return };
        let access = if is_workspace { KeptAccess::ReadOnly } else { KeptAccess::AsBefore };
        self.0.insert(services, MountStep::PrivateDirectory);
        for entry in entries.flatten() {
            let path = entry.path();
            if self.0.contains_key(&path) {
                continue;
            }
            let is_link = entry.file_type().is_ok_and(|kind| kind.is_symlink());
            let target = is_link.then(|| fs::read_link(&path).ok()).flatten();
            // What cannot be opened is of no use inside.
            let step = match target {
                Some(target) => Ok(MountStep::Link { target }),
                None => keep_step(&path, access),
            };
            self.0.extend(step.ok().map(|step| (path, step)));
        }
    }

    /// Adds the links of the plan, as far as the directory that they are in is hidden.
    fn add_links(&mut self, plan: &SandboxPlan) {
        for (path, target) in &plan.links {
            let directory = path.parent().and_then(|directory| fs::canonicalize(directory).ok());
            let (Some(directory), Some(name)) = (directory, path.file_name()) else { continue };
            if matches!(self.0.get(&directory), Some(MountStep::HideDirectory)) {
                self.0.insert(directory.join(name), MountStep::Link { target: target.clone() });
            }
        }
    }

    /// Adds a step for a directory, if there is one.
    fn add_directory(&mut self, path: &Path, step: MountStep) {
        if let Some(path) = fs::canonicalize(path).ok().filter(|path| path.is_dir() && path != Path::new("/"))
        {
            self.0.insert(path, step);
        }
    }

    /// Adds a step for what the path names, if it exists.
    fn add(&mut self, path: &Path, step: MountStep) {
        if let Ok(path) = fs::canonicalize(path) {
            self.0.insert(path, step);
        }
    }

    /// Keeps a path, if it exists.
    fn keep(&mut self, path: &Path, access: KeptAccess) -> Result<(), MountError> {
        let Ok(path) = fs::canonicalize(path) else { return Ok(()) };
        let step = keep_step(&path, access).map_err(|source| failed(&path, source))?;
        self.0.insert(path, step);
        Ok(())
    }

    /// What git runs by itself, and what decides that, cannot be changed. The directory above is a mount of its own, so
    /// that it cannot be replaced by another.
    fn protect_repository(&mut self, workspace: &Path) -> Result<(), MountError> {
        let repository = workspace.join(".git");
        if !fs::symlink_metadata(&repository).is_ok_and(|metadata| metadata.is_dir()) {
            return Ok(());
        }
        self.keep(&repository, KeptAccess::Writable)?;
        let hooks = repository.join("hooks");
        let _exists = fs::create_dir(&hooks);
        self.keep(&hooks, KeptAccess::ReadOnly)?;
        self.keep(&repository.join("config"), KeptAccess::ReadOnly)
    }

    /// Without this, ssh refuses to start for an ordinary user.
    fn copy_ssh_configuration(&mut self) {
        let Ok(entries) = fs::read_dir(SSH_CONFIGURATION) else { return };
        let files = entries.flatten().filter_map(|entry| {
            let path = entry.path();
            Some((path.clone(), fs::read(path).ok()?))
        });
        let copies: Vec<(PathBuf, Vec<u8>)> = files.collect();
        if !copies.is_empty() {
            self.add_directory(Path::new(SSH_CONFIGURATION), MountStep::CopiedDirectory(copies));
        }
    }

    fn apply(self) -> Result<(), MountError> {
        let mut finally_read_only = Vec::new();
        let mut private: Vec<PathBuf> = Vec::new();
        for (path, step) in self.0 {
            let applied = match step {
                MountStep::HideDirectory => {
                    finally_read_only.push(path.clone());
                    mount_empty(&path, c"mode=0755")
                }
                MountStep::PrivateDirectory => {
                    let mode = match path.to_str() {
                        Some(SERVICE_DIRECTORY) => c"mode=0755",
                        _ if is_shared_directory(&path) => c"mode=1777",
                        _ => c"mode=0700",
                    };
                    let is_in_private = private.iter().any(|above| path.starts_with(above));
                    private.push(path.clone());
                    match is_in_private && !path.exists() {
                        // What it is in is empty already, and costs no further mount.
                        true => fs::DirBuilder::new().mode(0o700).recursive(true).create(&path),
                        false => mount_empty(&path, mode),
                    }
                }
                MountStep::CopiedDirectory(files) => {
                    finally_read_only.push(path.clone());
                    mount_empty(&path, c"mode=0755")
                        .and_then(|()| files.iter().try_for_each(|(path, content)| fs::write(path, content)))
                }
                MountStep::Keep { tree, is_directory, access } => set_access(&tree, access)
                    .and_then(|()| at_mount_point(&path, is_directory, || attach(&tree, &path))),
                MountStep::Link { target } => std::os::unix::fs::symlink(target, &path),
                MountStep::Protect => protect(&path),
                MountStep::HideFile => at_mount_point(&path, false, || Ok(mount_bind("/dev/null", &path)?)),
            };
            applied.map_err(|source| failed(&path, source))?;
        }
        for path in finally_read_only {
            set_mount_read_only(CWD, &path, true, MountScope::One).map_err(|source| failed(&path, source))?;
        }
        Ok(())
    }
}

/// Whether a path that the plan names leads into the home or to credentials by a link. An agent can put a link in the place of
/// what it may write, and would see what the link leads to after its next start.
fn leads_into_hidden(plan: &SandboxPlan, named: &Path, path: &Path) -> bool {
    let hidden = [&plan.home].into_iter().chain(&plan.credentials);
    hidden.filter_map(|hidden| Some((hidden, fs::canonicalize(hidden).ok()?))).any(|(hidden, real)| {
        let below = named.strip_prefix(hidden).or(named.strip_prefix(&real));
        path.starts_with(&real) && !below.is_ok_and(|below| real.join(below) == path)
    })
}

/// The directories of temporary files and shared memory, which programs of other users may share.
fn is_shared_directory(path: &Path) -> bool {
    ["/tmp", "/var/tmp", "/dev/shm"].iter().any(|shared| path == Path::new(shared))
}

fn block_devices() -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir("/dev") else { return Vec::new() };
    let is_block_device = |entry: &fs::DirEntry| entry.file_type().is_ok_and(|kind| kind.is_block_device());
    entries.flatten().filter(is_block_device).map(|entry| entry.path()).collect()
}

/// Opens a copy of the mounts at and below a path, which stays usable when the path is hidden.
fn open_mount(path: &Path) -> io::Result<OwnedFd> {
    let flags =
        OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_RECURSIVE;
    Ok(open_tree(CWD, path, flags)?)
}

/// The step that keeps an existing path. What it names now counts, whatever becomes of it meanwhile.
fn keep_step(path: &Path, access: KeptAccess) -> io::Result<MountStep> {
    let tree = open_mount(path)?;
    let is_directory = FileType::from_raw_mode(fstat(&tree)?.st_mode).is_dir();
    Ok(MountStep::Keep { tree, is_directory, access })
}

/// Decides who can write what is kept.
fn set_access(tree: &OwnedFd, access: KeptAccess) -> io::Result<()> {
    let nothing = Path::new("");
    let set_all = |read_only| set_mount_read_only(tree.as_fd(), nothing, read_only, MountScope::WithAllBelow);
    match access {
        KeptAccess::AsBefore => Ok(()),
        KeptAccess::ReadOnly => set_all(true),
        // A mount below that is read-only outside cannot be made writable, and need not be.
        KeptAccess::Writable => set_all(false).or_else(|_| {
            let _stays_read_only = set_mount_read_only(tree.as_fd(), nothing, false, MountScope::One);
            Ok(())
        }),
    }
}

fn attach(tree: &OwnedFd, path: &Path) -> io::Result<()> {
    Ok(move_mount(tree, "", CWD, path, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?)
}

/// Makes a path read-only where it is. If it is gone meanwhile, there is nothing to protect.
fn protect(path: &Path) -> io::Result<()> {
    let set_read_only = || set_mount_read_only(CWD, path, true, MountScope::WithAllBelow);
    // Only what is a mount can be read-only by itself.
    let protected = set_read_only().or_else(|_| {
        mount_bind_recursive(path, path)?;
        set_read_only()
    });
    protected.or_else(|error| if error.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(error) })
}

fn mount_empty(path: &Path, mode: &std::ffi::CStr) -> io::Result<()> {
    at_mount_point(path, true, || {
        Ok(mount("tmpfs", path, "tmpfs", MountFlags::NOSUID | MountFlags::NODEV, mode)?)
    })
}

/// Mounts something at a path. If a directory above was hidden, there is nothing to mount on yet, and it is made. A file
/// that a program replaces at this moment is missing in the same way, so what exists is never changed.
fn at_mount_point(
    path: &Path,
    is_directory: bool,
    mount_there: impl Fn() -> io::Result<()>,
) -> io::Result<()> {
    for _ in 0..MOUNT_ATTEMPTS {
        match mount_there() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            mounted => return mounted,
        }
        match path.parent() {
            Some(parent) if !is_directory => {
                fs::create_dir_all(parent)?;
                match File::create_new(path) {
                    Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                    created => drop(created?),
                }
            }
            _ => fs::create_dir_all(path)?,
        }
    }
    mount_there()
}

fn failed(path: &Path, source: impl Into<io::Error>) -> MountError {
    MountError { path: path.to_owned(), source: source.into() }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn a_file_that_is_replaced_while_something_is_mounted_on_it_keeps_its_content() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("config");
        fs::write(&file, "[user]").unwrap();
        let attempts = Cell::new(0);
        let mount_there = || {
            attempts.set(attempts.get() + 1);
            if attempts.get() < 3 { Err(io::ErrorKind::NotFound.into()) } else { Ok(()) }
        };
        at_mount_point(&file, false, mount_there).unwrap();
        assert_eq!(attempts.get(), 3);
        assert_eq!(fs::read_to_string(&file).unwrap(), "[user]");
    }

    #[test]
    fn a_mount_point_that_is_missing_is_made() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("hidden/config");
        let mount_there = || fs::symlink_metadata(&file).map(drop);
        at_mount_point(&file, false, mount_there).unwrap();
        assert!(file.is_file());
        let nobody = || Err(io::ErrorKind::NotFound.into());
        assert!(at_mount_point(&file, false, nobody).is_err(), "it is not tried for ever");
    }
}
