//! `git push` over ssh from inside a sandbox, to a real sshd. At `deck` it works, also for an ordinary user, to whom files
//! of root look like those of a stranger. At `workspace` it fails, because the keys are hidden.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use qd_testkit::git::{git, make_repository};
use qd_testkit::{OrdinaryUser, TestDaemon, TestHome};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::process::Command;
use tokio::task::JoinHandle;

/// What the agent does: a commit in its worktree, and a push of it.
const COMMIT_AND_PUSH: &str = "exec 2>&1; set -e
echo change > b.txt
git add b.txt
git commit -q -m 'by an agent'
git push -q origin HEAD:refs/heads/pushed
git rev-parse HEAD
";
/// A file of root that ssh includes, as packages install them.
const SSH_CONFIGURATION: &str = "if [ -d /etc/ssh/ssh_config.d ]; then
mount -t tmpfs -o mode=755 none /etc/ssh/ssh_config.d
printf 'Host *\\n    SendEnv LANG\\n' > /etc/ssh/ssh_config.d/package.conf
fi";

#[tokio::test]
async fn at_deck_an_agent_of_whoever_runs_the_tests_pushes_over_ssh() {
    check_push(None).await;
}

#[tokio::test]
async fn at_deck_an_agent_of_an_ordinary_user_pushes_over_ssh() {
    check_push(Some(ordinary_user())).await;
}

#[tokio::test]
async fn at_workspace_an_agent_of_whoever_runs_the_tests_has_no_key_to_push_with() {
    check_no_push(None).await;
}

#[tokio::test]
async fn at_workspace_an_agent_of_an_ordinary_user_has_no_key_to_push_with() {
    check_no_push(Some(ordinary_user())).await;
}

fn ordinary_user() -> OrdinaryUser {
    OrdinaryUser::find().expect("the machine has an ordinary user").prepared_by(SSH_CONFIGURATION)
}

async fn check_push(user: Option<OrdinaryUser>) {
    let server = SshServer::start().await;
    let Some(run) = commit_and_push(&server, user, "deck").await else { return };
    assert_eq!(run["finish_reason"], "end_turn", "{run:#}");
    let pushed = git(&server.repository(), &["rev-parse", "refs/heads/pushed"]);
    assert!(run["text"].as_str().unwrap().trim_end().ends_with(&pushed), "{pushed}: {run:#}");
    let title = git(&server.repository(), &["log", "-1", "--format=%s", "refs/heads/pushed"]);
    assert_eq!(title, "by an agent");
}

async fn check_no_push(user: Option<OrdinaryUser>) {
    let server = SshServer::start().await;
    let Some(run) = commit_and_push(&server, user, "workspace").await else { return };
    assert_eq!(run["finish_reason"], "error", "{run:#}");
    let text = run["text"].as_str().unwrap();
    for words in ["Permission denied (publickey)", "fatal: Could not read from remote repository."] {
        assert!(text.contains(words), "{words}: {run:#}");
    }
    assert_eq!(git(&server.repository(), &["branch", "--list", "pushed"]), "");
}

/// Has an agent commit and push at this level, and gives its run. `None` if this machine cannot confine agents.
async fn commit_and_push(server: &SshServer, user: Option<OrdinaryUser>, level: &str) -> Option<Value> {
    let home = TestHome::new();
    let project = home.project_dir();
    make_repository(&project);
    git(&project, &["remote", "add", "origin", &server.url()]);
    let keys = home.sibling_path("user/.ssh");
    std::fs::create_dir_all(&keys).unwrap();
    std::fs::set_permissions(&keys, PermissionsExt::from_mode(0o700)).unwrap();
    let key = keys.join("id_ed25519");
    server.authorize(&make_key(&key).await);
    // ssh looks for keys in the home directory that the list of users names, which is not the test's.
    let ssh = format!(
        "ssh -i {} -o IdentitiesOnly=yes -o BatchMode=yes -o StrictHostKeyChecking=accept-new \
         -o UserKnownHostsFile={}",
        key.display(),
        keys.join("known_hosts").display()
    );
    let daemon = TestDaemon::start_in(home, |options| {
        if let Some(user) = user {
            options.run_by(user);
        }
    })
    .await;
    let settings = json!({
        "agent": "exec:sh", "worktree": true, "sandbox": level, "env": { "GIT_SSH_COMMAND": ssh },
    });
    let workspace = daemon.workspace().await;
    let created = workspace.try_session(settings.clone()).await;
    if created.status == 409 {
        created.expect_refusal(409, "sandbox_unavailable");
        return None;
    }
    let session = workspace.session_with(settings).await;
    let run = session.prompt(COMMIT_AND_PUSH).await;
    Some(session.wait(&run).await)
}

/// Makes a key without a passphrase, and gives its public part.
async fn make_key(path: &Path) -> String {
    let mut command = Command::new("ssh-keygen");
    let made = command.args(["-q", "-t", "ed25519", "-N", "", "-C", "test", "-f"]).arg(path).status().await;
    assert!(made.unwrap().success());
    std::fs::read_to_string(path.with_extension("pub")).unwrap()
}

/// An sshd for each connection to a port on loopback, and a repository that it serves. It admits only whoever runs the
/// tests, and only with keys that the test has authorized.
struct SshServer {
    folder: tempfile::TempDir,
    user: String,
    port: u16,
    accept_task: JoinHandle<()>,
}

impl SshServer {
    async fn start() -> Self {
        let folder = tempfile::Builder::new().prefix("qd-ssh").tempdir_in("/tmp").unwrap();
        let path = |name: &str| folder.path().join(name).display().to_string();
        make_key(&folder.path().join("host_key")).await;
        let configuration = format!(
            "HostKey {}\nAuthorizedKeysFile {}\nStrictModes no\nUsePAM no\nPasswordAuthentication no\n\
             KbdInteractiveAuthentication no\nPermitRootLogin prohibit-password\nPidFile none\nSetEnv PATH={}\n",
            path("host_key"),
            path("authorized_keys"),
            std::env::var("PATH").unwrap()
        );
        std::fs::write(folder.path().join("sshd_config"), configuration).unwrap();
        git(folder.path(), &["init", "-q", "--bare", "repository.git"]);
        let names = Command::new("id").arg("-un").output().await.unwrap();
        let user = String::from_utf8(names.stdout).unwrap().trim().to_owned();
        if user == "root" {
            // Where sshd confines its process that talks to strangers. A service manager would have made it.
            std::fs::create_dir_all("/run/sshd").unwrap();
        }
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let accept_task = tokio::spawn(serve_connections(listener, folder.path().join("sshd_config")));
        Self { folder, user, port, accept_task }
    }

    fn repository(&self) -> PathBuf {
        self.folder.path().join("repository.git")
    }

    fn url(&self) -> String {
        format!("ssh://{}@127.0.0.1:{}{}", self.user, self.port, self.repository().display())
    }

    fn authorize(&self, public_key: &str) {
        std::fs::write(self.folder.path().join("authorized_keys"), public_key).unwrap();
    }
}

impl Drop for SshServer {
    fn drop(&mut self) {
        self.accept_task.abort();
    }
}

/// Starts an sshd for each connection. It ends with its connection.
async fn serve_connections(listener: TcpListener, configuration: PathBuf) {
    loop {
        let (connection, _) = listener.accept().await.unwrap();
        let connection = connection.into_std().unwrap();
        connection.set_nonblocking(false).unwrap();
        let input = std::os::fd::OwnedFd::from(connection.try_clone().unwrap());
        let log = std::fs::File::create(configuration.with_file_name("sshd.log")).unwrap();
        let mut sshd = Command::new(sshd_program());
        sshd.args(["-i", "-e", "-f"]).arg(&configuration).stdin(Stdio::from(input));
        sshd.stdout(Stdio::from(std::os::fd::OwnedFd::from(connection))).stderr(Stdio::from(log));
        let mut child = sshd.spawn().unwrap();
        tokio::spawn(async move { child.wait().await });
    }
}

/// sshd wants to be started by its whole path, and is not in every PATH.
fn sshd_program() -> PathBuf {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain(["/usr/sbin".into(), "/usr/local/sbin".into()]);
    let mut programs = folders.map(|folder| folder.join("sshd"));
    programs.find(|program| program.is_file()).expect("sshd is installed")
}
