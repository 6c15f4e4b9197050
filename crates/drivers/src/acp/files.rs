//! Serves the workspace's files to agents that read and write through their client. A path must be inside the workspace
//! after all symlinks are followed. This keeps an honest agent in its workspace; it is no sandbox.

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
use rustix::fs::OFlags;
use serde_json::Value;
use tokio::fs::{File, OpenOptions};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// The largest file that is served, in bytes.
const READ_MAX: usize = BODY_MAX;
/// The most file requests in progress at once; more are refused.
const IN_PROGRESS_MAX: usize = 64;

/// A response and the id of its request.
pub(super) type AcpServiceResponse = (RawJsonRpcId, Result<Value, Error>);

/// File requests in progress. They outlive a turn, since every request must be answered.
pub(super) struct AcpFileService {
    root: PathBuf,
    in_progress: FuturesUnordered<BoxFuture<'static, AcpServiceResponse>>,
}

impl AcpFileService {
    pub(super) fn for_workspace(root: &Path) -> Self {
        Self { root: root.to_owned(), in_progress: FuturesUnordered::new() }
    }

    /// The agent's working directory.
    pub(super) fn root(&self) -> &Path {
        &self.root
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

async fn read_text(root: &Path, request: &ReadTextFileRequest) -> Result<String, Error> {
    let path = request.path.as_path();
    let error = |cause: std::io::Error| file_error("read", path, &cause);
    let resolved = resolve_in_workspace(root, path).await.map_err(error)?;
    let file = open_regular_file(OpenOptions::new().read(true), &resolved).await.map_err(error)?;
    let mut content = String::new();
    file.take(READ_MAX as u64 + 1).read_to_string(&mut content).await.map_err(error)?;
    if content.len() > READ_MAX {
        let why = format!("it is longer than {READ_MAX} bytes");
        return Err(error(std::io::Error::new(std::io::ErrorKind::FileTooLarge, why)));
    }
    Ok(line_range(content, request.line, request.limit))
}

async fn write_text(root: &Path, path: &Path, content: &str) -> Result<(), Error> {
    let error = |cause: std::io::Error| file_error("write", path, &cause);
    let resolved = resolve_in_workspace(root, path).await.map_err(error)?;
    if let Some(folder) = resolved.parent() {
        tokio::fs::create_dir_all(folder).await.map_err(error)?;
    }
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true);
    let mut file = open_regular_file(&mut options, &resolved).await.map_err(error)?;
    file.write_all(content.as_bytes()).await.map_err(error)?;
    // Tokio's `File` drops unflushed data without an error.
    file.flush().await.map_err(error)
}

/// Opens a regular file and nothing else: a pipe or a terminal could block a thread for ever.
async fn open_regular_file(options: &mut OpenOptions, path: &Path) -> std::io::Result<File> {
    let flags = OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = options.custom_flags(flags.bits().cast_signed()).open(path).await?;
    match file.metadata().await?.is_file() {
        true => Ok(file),
        false => Err(permission_denied("it is not a file")),
    }
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

    async fn read_all(root: &Path, path: impl Into<PathBuf>) -> Result<String, String> {
        read_text(root, &ReadTextFileRequest::new("s", path)).await.map_err(|error| error.message)
    }

    #[tokio::test]
    async fn files_inside_the_workspace_are_written_and_read() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("deep/er/f.txt");
        write_text(home.path(), &path, "one\ntwo\nthree\n").await.unwrap();
        assert_eq!(read_all(home.path(), &path).await.unwrap(), "one\ntwo\nthree\n");
        let request = ReadTextFileRequest::new("s", &path).line(2).limit(1);
        assert_eq!(read_text(home.path(), &request).await.unwrap(), "two\n");
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
            assert!(write_text(workspace.path(), &path, "y").await.is_err(), "{}", path.display());
        }
        assert_eq!(std::fs::read_to_string(outside.path().join("secret")).unwrap(), "x");
        assert!(!outside.path().join("absent").exists() && !outside.path().join("new").exists());
    }

    #[tokio::test]
    async fn only_a_file_that_does_not_exist_is_reported_as_not_found() {
        let home = tempfile::tempdir().unwrap();
        let code = async |path: &Path| {
            read_text(home.path(), &ReadTextFileRequest::new("s", path)).await.unwrap_err().code
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
        write_text(home.path(), &home.path().join("alias"), "y").await.unwrap();
        assert_eq!(std::fs::read_to_string(home.path().join("real")).unwrap(), "y");
    }

    #[tokio::test]
    async fn a_pipe_is_refused_and_keeps_nobody_waiting() {
        let home = tempfile::tempdir().unwrap();
        let pipe = home.path().join("pipe");
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        assert!(read_all(home.path(), &pipe).await.unwrap_err().contains("not a file"));
        assert!(write_text(home.path(), &pipe, "x").await.is_err(), "nobody reads");
        assert!(read_all(home.path(), home.path()).await.unwrap_err().contains("not a file"));
    }
}
