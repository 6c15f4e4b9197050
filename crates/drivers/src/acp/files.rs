//! Serves the workspace's files to agents that read and write through their client. A path must be inside the workspace
//! after all symlinks are followed. This process is outside the agent's sandbox, so a path that the agent changes meanwhile
//! must not lead anywhere else, and what is read-only in there is not written here.

use std::path::{Component, Path, PathBuf};

use agent_client_protocol::v1::schema::{
    CLIENT_METHOD_NAMES as FS, ReadTextFileRequest, ReadTextFileResponse, WriteTextFileRequest,
    WriteTextFileResponse,
};
use agent_client_protocol::{Error, ErrorCode, JsonRpcResponse, RawJsonRpcId};
use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use qd_protocol::limits::BODY_MAX;
use qd_protocol::sandbox::SandboxSetting;
use qd_protocol::worker::AgentSpec;
use rustix::fs::{CWD, Mode, OFlags, mkdirat, openat};
use serde_json::Value;
use tokio::fs::File;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// The largest file that is served, in bytes.
const READ_MAX: usize = BODY_MAX;
/// The most file requests in progress at once; more are refused.
const IN_PROGRESS_MAX: usize = 64;
/// What git runs by itself, and what decides that. In a sandbox of the level `workspace` it is read-only.
const PROTECTED: [&str; 2] = [".git/hooks", ".git/config"];

/// A response and the id of its request.
pub(super) type AcpServiceResponse = (RawJsonRpcId, Result<Value, Error>);

/// File requests in progress. They outlive a turn, since every request must be answered.
pub(super) struct AcpFileService {
    root: ServedDirectory,
    in_progress: FuturesUnordered<BoxFuture<'static, AcpServiceResponse>>,
}

/// The directory that is served.
#[derive(Debug, Clone)]
struct ServedDirectory {
    path: PathBuf,
    /// The agent's sandbox has [`PROTECTED`] paths.
    protects_repository: bool,
}

impl AcpFileService {
    pub(super) fn for_agent(spec: &AgentSpec) -> Self {
        let asked = spec.sandbox.as_ref().map(|sandbox| sandbox.asked);
        let protects_repository = asked == Some(SandboxSetting::Workspace);
        let root = ServedDirectory { path: spec.cwd.clone(), protects_repository };
        Self { root, in_progress: FuturesUnordered::new() }
    }

    /// The agent's working directory.
    pub(super) fn root(&self) -> &Path {
        &self.root.path
    }

    /// Starts a read.
    pub(super) fn read(&mut self, id: RawJsonRpcId, request: ReadTextFileRequest) {
        let root = self.root.clone();
        self.start_request(id, async move {
            let content = read_text(&root, &request).await?;
            ReadTextFileResponse::new(content).into_json(FS.fs_read_text_file)
        });
    }

    /// Starts a write.
    pub(super) fn write(&mut self, id: RawJsonRpcId, request: WriteTextFileRequest) {
        let root = self.root.clone();
        self.start_request(id, async move {
            write_text(&root, &request.path, &request.content).await?;
            WriteTextFileResponse::new().into_json(FS.fs_write_text_file)
        });
    }

    /// Returns the next response, and waits for ever if none is pending. Cancel safe.
    pub(super) async fn next(&mut self) -> AcpServiceResponse {
        match self.in_progress.next().await {
            Some(response) => response,
            None => std::future::pending().await,
        }
    }

    fn start_request(
        &mut self,
        id: RawJsonRpcId,
        work: impl Future<Output = Result<Value, Error>> + Send + 'static,
    ) {
        let refused = self.in_progress.len() >= IN_PROGRESS_MAX;
        self.in_progress.push(Box::pin(async move {
            if refused {
                return (
                    id,
                    Err(Error::new(
                        ErrorCode::INTERNAL_ERROR,
                        "too many file requests at once; wait for some to finish",
                    )),
                );
            }
            (id, work.await)
        }));
    }
}

async fn read_text(root: &ServedDirectory, request: &ReadTextFileRequest) -> Result<String, Error> {
    let path = request.path.as_path();
    let error = |cause: std::io::Error| file_error("read", path, &cause);
    let file = root.open(path, OFlags::RDONLY).await.map_err(error)?;
    let mut content = String::new();
    file.take(READ_MAX as u64 + 1).read_to_string(&mut content).await.map_err(error)?;
    if content.len() > READ_MAX {
        let why = format!("it is longer than {READ_MAX} bytes");
        return Err(error(std::io::Error::new(std::io::ErrorKind::FileTooLarge, why)));
    }
    Ok(line_range(content, request.line, request.limit))
}

async fn write_text(root: &ServedDirectory, path: &Path, content: &str) -> Result<(), Error> {
    let error = |cause: std::io::Error| file_error("write", path, &cause);
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC;
    let mut file = root.open(path, flags).await.map_err(error)?;
    file.write_all(content.as_bytes()).await.map_err(error)?;
    // Tokio's `File` drops unflushed data without an error.
    file.flush().await.map_err(error)
}

impl ServedDirectory {
    /// Opens a regular file and nothing else: a pipe or a terminal could block a thread for ever. With `CREATE`, makes the
    /// directories above it too.
    async fn open(&self, path: &Path, flags: OFlags) -> std::io::Result<File> {
        let root = tokio::fs::canonicalize(&self.path).await?;
        let resolved = resolve_in_workspace(&root, path).await?;
        let below = resolved.strip_prefix(&root).map_err(|_| permission_denied("no such path"))?;
        let is_protected = self.protects_repository && PROTECTED.iter().any(|path| below.starts_with(path));
        if is_protected && flags.contains(OFlags::CREATE) {
            return Err(permission_denied("it is read-only in the sandbox"));
        }
        let below = below.to_owned();
        let opened = tokio::task::spawn_blocking(move || open_below(&root, &below, flags)).await;
        let file = File::from_std(opened.map_err(std::io::Error::other)??);
        match file.metadata().await?.is_file() {
            true => Ok(file),
            false => Err(permission_denied("it is not a file")),
        }
    }
}

/// Opens a path below a directory without following any link: the agent could have made one since the path was resolved.
fn open_below(root: &Path, path: &Path, flags: OFlags) -> std::io::Result<std::fs::File> {
    let as_folder = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let creates = flags.contains(OFlags::CREATE);
    let mut folder = openat(CWD, root, as_folder, Mode::empty())?;
    for name in path.parent().into_iter().flat_map(Path::iter) {
        if creates {
            match mkdirat(&folder, name, Mode::from_raw_mode(0o777)) {
                Ok(()) | Err(rustix::io::Errno::EXIST) => {}
                Err(error) => return Err(error.into()),
            }
        }
        folder = openat(&folder, name, as_folder, Mode::empty())?;
    }
    let flags = flags | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let name = path.file_name().unwrap_or(".".as_ref());
    Ok(openat(&folder, name, flags, Mode::from_raw_mode(0o666))?.into())
}

/// At most `limit` lines, starting with `line`, which counts from 1.
fn line_range(content: String, line: Option<u32>, limit: Option<u32>) -> String {
    if line.is_none() && limit.is_none() {
        return content;
    }
    let first = line.unwrap_or(1).saturating_sub(1) as usize;
    let max_lines = limit.map_or(usize::MAX, |limit| limit as usize);
    content.split_inclusive('\n').skip(first).take(max_lines).collect()
}

/// Resolves the symlinks of a path that may not exist yet, and fails if it leads outside `root`.
pub(super) async fn resolve_in_workspace(root: &Path, path: &Path) -> std::io::Result<PathBuf> {
    if !path.is_absolute() || path.components().any(|part| part == Component::ParentDir) {
        return Err(permission_denied("the path must be absolute and without `..`"));
    }
    let root = tokio::fs::canonicalize(root).await?;
    // A component that does not exist cannot be a symlink, so the deepest existing one decides. `symlink_metadata` also
    // finds a dangling symlink, which then fails to resolve.
    let mut existing = path;
    while tokio::fs::symlink_metadata(existing).await.is_err() {
        existing = existing.parent().ok_or_else(|| permission_denied("no such path"))?;
    }
    let rest = path.strip_prefix(existing).map_err(|_| permission_denied("no such path"))?;
    let resolved = tokio::fs::canonicalize(existing).await?;
    if !resolved.starts_with(&root) {
        return Err(permission_denied("it is outside the workspace"));
    }
    Ok(if rest.as_os_str().is_empty() { resolved } else { resolved.join(rest) })
}

fn permission_denied(why: &str) -> std::io::Error {
    std::io::Error::new(std::io::ErrorKind::PermissionDenied, why)
}

/// The error for the agent. Only a file that does not exist is "not found": an agent then knows that it may create it.
fn file_error(verb: &str, path: &Path, cause: &std::io::Error) -> Error {
    let code = match cause.kind() {
        std::io::ErrorKind::NotFound => ErrorCode::RESOURCE_NOT_FOUND,
        _ => ErrorCode::INVALID_PARAMS,
    };
    Error::new(code, format!("cannot {verb} {}: {cause}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn served(path: &Path) -> ServedDirectory {
        ServedDirectory { path: path.to_owned(), protects_repository: false }
    }

    async fn read_all(root: &Path, path: impl Into<PathBuf>) -> Result<String, String> {
        read_text(&served(root), &ReadTextFileRequest::new("s", path)).await.map_err(|error| error.message)
    }

    #[tokio::test]
    async fn files_inside_the_workspace_are_written_and_read() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("deep/er/f.txt");
        write_text(&served(home.path()), &path, "one\ntwo\nthree\n").await.unwrap();
        assert_eq!(read_all(home.path(), &path).await.unwrap(), "one\ntwo\nthree\n");
        let request = ReadTextFileRequest::new("s", &path).line(2).limit(1);
        assert_eq!(read_text(&served(home.path()), &request).await.unwrap(), "two\n");
    }

    #[tokio::test]
    async fn no_path_and_no_symlink_leads_out_of_the_workspace() {
        let (workspace, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        std::fs::write(outside.path().join("secret"), "x").unwrap();
        std::os::unix::fs::symlink(outside.path(), workspace.path().join("door")).unwrap();
        std::os::unix::fs::symlink(outside.path().join("absent"), workspace.path().join("trap")).unwrap();
        let paths = [
            outside.path().join("secret"),
            workspace.path().join("door/secret"),
            workspace.path().join("door/new"),
            workspace.path().join("trap"),
            workspace.path().join("..").join(outside.path().file_name().unwrap()).join("secret"),
            PathBuf::from("secret"),
        ];
        for path in paths {
            assert!(read_all(workspace.path(), &path).await.is_err(), "{}", path.display());
            assert!(write_text(&served(workspace.path()), &path, "y").await.is_err(), "{}", path.display());
        }
        assert_eq!(std::fs::read_to_string(outside.path().join("secret")).unwrap(), "x");
        assert!(!outside.path().join("absent").exists() && !outside.path().join("new").exists());
    }

    #[test]
    fn a_link_that_was_made_after_the_path_was_resolved_is_not_followed() {
        let (workspace, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        std::fs::write(outside.path().join("secret"), "x").unwrap();
        std::os::unix::fs::symlink(outside.path(), workspace.path().join("door")).unwrap();
        std::os::unix::fs::symlink(outside.path().join("secret"), workspace.path().join("trap")).unwrap();
        let write = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC;
        for path in ["door/secret", "door/new", "door/deep/new", "trap"].map(Path::new) {
            open_below(workspace.path(), path, OFlags::RDONLY).unwrap_err();
            open_below(workspace.path(), path, write).unwrap_err();
        }
        assert_eq!(std::fs::read_to_string(outside.path().join("secret")).unwrap(), "x");
        assert_eq!(std::fs::read_dir(outside.path()).unwrap().count(), 1);
    }

    #[tokio::test]
    async fn what_is_read_only_in_the_sandbox_is_not_written_from_outside() {
        let home = tempfile::tempdir().unwrap();
        let root = ServedDirectory { path: home.path().to_owned(), protects_repository: true };
        std::fs::create_dir_all(home.path().join(".git/hooks")).unwrap();
        std::os::unix::fs::symlink(home.path().join(".git"), home.path().join("alias")).unwrap();
        for path in [".git/hooks/pre-commit", ".git/config", "alias/hooks/pre-commit", "alias/config"] {
            write_text(&root, &home.path().join(path), "x").await.unwrap_err();
        }
        write_text(&root, &home.path().join(".git/description"), "x").await.unwrap();
        write_text(&served(home.path()), &home.path().join(".git/config"), "x").await.unwrap();
    }

    #[tokio::test]
    async fn only_a_file_that_does_not_exist_is_reported_as_not_found() {
        let home = tempfile::tempdir().unwrap();
        let code = async |path: &Path| {
            read_text(&served(home.path()), &ReadTextFileRequest::new("s", path)).await.unwrap_err().code
        };
        assert_eq!(code(&home.path().join("absent")).await, ErrorCode::RESOURCE_NOT_FOUND);
        assert_eq!(code(&home.path().join("absent/too")).await, ErrorCode::RESOURCE_NOT_FOUND);
        assert_eq!(code(Path::new("/etc/hostname")).await, ErrorCode::INVALID_PARAMS);
        assert_eq!(code(home.path()).await, ErrorCode::INVALID_PARAMS);
    }

    #[tokio::test]
    async fn a_symlink_within_the_workspace_is_followed() {
        let home = tempfile::tempdir().unwrap();
        std::fs::write(home.path().join("real"), "x").unwrap();
        std::os::unix::fs::symlink(home.path().join("real"), home.path().join("alias")).unwrap();
        write_text(&served(home.path()), &home.path().join("alias"), "y").await.unwrap();
        assert_eq!(std::fs::read_to_string(home.path().join("real")).unwrap(), "y");
    }

    #[tokio::test]
    async fn a_pipe_is_refused_and_keeps_nobody_waiting() {
        let home = tempfile::tempdir().unwrap();
        let pipe = home.path().join("pipe");
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        assert!(read_all(home.path(), &pipe).await.unwrap_err().contains("not a file"));
        assert!(write_text(&served(home.path()), &pipe, "x").await.is_err(), "nobody reads");
        assert!(read_all(home.path(), home.path()).await.unwrap_err().contains("not a file"));
    }
}
