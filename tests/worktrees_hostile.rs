//! An agent can write whatever is in its worktree and, without a sandbox, in the repository. The daemon's git acts for
//! people, outside the agent's tree, so it must run none of the programs that are named there.
//!
//! Each trap is shown to work against plain git first. Then everything is done with the worktree that makes the daemon
//! use git, and the trap's program must not run.

use std::path::{Path, PathBuf};
use std::process::Command;

use qd_testkit::git::{commit, git};
use qd_testkit::{TestDaemon, TestSession, poll_until, script::*};
use serde_json::{Value, json};

use crate::worktrees::{in_worktree, path_of, repository};

/// Where a trap is set.
struct TrapSite {
    repo: PathBuf,
    worktree: PathBuf,
    /// Git's directory for the worktree.
    git_dir: PathBuf,
    /// A directory for what an attacker needs besides.
    outside: PathBuf,
}

impl TrapSite {
    fn marker(&self) -> PathBuf {
        self.outside.join("it-ran")
    }

    /// The program that must not run. It works as a filter too.
    fn program(&self) -> String {
        let program = self.outside.join("program");
        let text = format!("#!/bin/sh\ntouch {}\nexec cat \"$@\"\n", self.marker().display());
        write_program(&program, &text);
        program.display().to_string()
    }

    /// Sets a value in the repository's configuration.
    fn config(&self, name: &str, value: &str) {
        plain_git(&self.repo, &["config", name, value]);
    }

    fn attributes(&self, text: &str) {
        std::fs::write(self.worktree.join(".gitattributes"), text).unwrap();
    }
}

fn write_program(path: &Path, text: &str) {
    use std::os::unix::fs::PermissionsExt;
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, text).unwrap();
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
}

/// Git as a person would run it, whether or not it succeeds.
fn plain_git(dir: &Path, args: &[&str]) {
    let mut command = Command::new("git");
    command.env("GIT_CONFIG_NOSYSTEM", "1").env("GIT_CONFIG_GLOBAL", "/dev/null");
    command.arg("-C").arg(dir).args(args).output().expect("git is installed");
}

/// Sets a trap, shows that plain git falls into it, and that the daemon does not.
async fn expect_safe(set: fn(&TrapSite), spring: fn(&TrapSite)) {
    let daemon = TestDaemon::start().await;
    let repo = repository(&daemon);
    let (session, worktree) = in_worktree(&daemon).await;
    session.run_script(&[write("a.txt", "changed\n"), write("new.txt", "new\n")]).await;
    let site = TrapSite {
        git_dir: repo.join(".git/worktrees").join(&session.id),
        outside: daemon.home.sibling_path("outside"),
        repo,
        worktree,
    };
    std::fs::create_dir_all(&site.outside).unwrap();
    // The target moves on, so that a merge has something to merge.
    commit(&site.repo, "other.txt", "meanwhile\n");
    set(&site);
    spring(&site);
    assert!(site.marker().exists(), "the trap does not work against plain git");
    std::fs::remove_file(site.marker()).unwrap();
    use_worktree(&daemon, &session, &site).await;
}

/// Does everything with a worktree that makes the daemon use git.
async fn use_worktree(daemon: &TestDaemon, session: &TestSession, site: &TrapSite) {
    let safe = |what: &str| assert!(!site.marker().exists(), "{what} ran the program");
    session.client.get(&session.path("/diff")).await;
    safe("the diff");
    session.client.get(&session.path("/diff?stat=true")).await;
    safe("the diff of names");
    daemon.client().get("/v1/worktrees?lines=true").await.expect(200);
    safe("the list");
    kill_worker(daemon, session).await;
    session.run_script(&[say("again")]).await;
    safe("the next start");
    session.client.post(&session.path("/merge"), &json!({ "squash": true })).await;
    safe("a squashed merge");
    session.client.post(&session.path("/merge"), &json!({})).await;
    safe("a merge");
    let (next, _) = in_worktree(daemon).await;
    next.run_script(&[write("next.txt", "x\n")]).await;
    safe("a new worktree");
    let file = "fleet:\n  base_branch: main\n  task: x\n  sessions: { a: { agent: echo } }\n  start: a\n";
    let workspace = daemon.workspace().await;
    workspace.fleet(file).await.wait_for_end().await;
    safe("a fleet's base branch");
    close(session).await;
    session.client.delete(&session.path("/worktree")).await;
    safe("a removal");
    session.client.delete(&session.path("/worktree?force=true")).await;
    safe("a forced removal");
    assert!(!site.worktree.exists());
}

/// Ends the agent, so that the next prompt starts another in the worktree.
async fn kill_worker(daemon: &TestDaemon, session: &TestSession) {
    daemon.home.kill_workers();
    session.wait_for_event("the end of its worker", |event| event.kind == "worker.exited").await;
}

async fn close(session: &TestSession) {
    session.close().await;
    session.wait_for_event("its end", |event| event.kind == "session.closed").await;
}

macro_rules! traps {
    ($($name:ident: $set:expr, $spring:expr;)*) => {
        $(#[tokio::test]
        async fn $name() {
            expect_safe($set, $spring).await;
        })*
    };
}

traps! {
    a_clean_filter_of_the_repository_is_not_run:
        |site| {
            site.config("filter.x.clean", &site.program());
            site.attributes("* filter=x\n");
        },
        |site| plain_git(&site.worktree, &["add", "new.txt"]);
    a_smudge_filter_of_the_repository_is_not_run:
        |site| {
            site.config("filter.x.smudge", &site.program());
            commit(&site.worktree, ".gitattributes", "* filter=x\n");
            plain_git(&site.repo, &["merge", "-q", "--no-edit", &git(&site.worktree, &["rev-parse", "HEAD"])]);
        },
        |site| {
            std::fs::remove_file(site.worktree.join("a.txt")).unwrap();
            plain_git(&site.worktree, &["checkout", "--", "a.txt"]);
        };
    a_filter_process_of_the_repository_is_not_run:
        |site| {
            site.config("filter.x.process", &site.program());
            site.attributes("* filter=x\n");
        },
        |site| plain_git(&site.worktree, &["add", "--all", "--dry-run"]);
    a_filter_in_info_attributes_is_not_run:
        |site| {
            site.config("filter.x.clean", &site.program());
            std::fs::create_dir_all(site.repo.join(".git/info")).unwrap();
            std::fs::write(site.repo.join(".git/info/attributes"), "* filter=x\n").unwrap();
        },
        |site| plain_git(&site.worktree, &["add", "--all", "--dry-run"]);
    a_filter_in_another_attributes_file_is_not_run:
        |site| {
            site.config("filter.x.clean", &site.program());
            let file = site.outside.join("attributes");
            std::fs::write(&file, "* filter=x\n").unwrap();
            site.config("core.attributesFile", file.to_str().unwrap());
        },
        |site| plain_git(&site.worktree, &["add", "--all", "--dry-run"]);
    a_text_conversion_of_the_repository_is_not_run:
        |site| {
            site.config("diff.x.textconv", &site.program());
            site.attributes("* diff=x\n");
        },
        |site| plain_git(&site.worktree, &["diff", "HEAD"]);
    a_diff_command_of_the_repository_is_not_run:
        |site| {
            site.config("diff.x.command", &site.program());
            site.attributes("* diff=x\n");
        },
        |site| plain_git(&site.worktree, &["diff", "HEAD"]);
    an_external_diff_of_the_repository_is_not_run:
        |site| site.config("diff.external", &site.program()),
        |site| plain_git(&site.worktree, &["diff", "HEAD"]);
    a_merge_driver_of_the_repository_is_not_run:
        |site| {
            site.config("merge.x.driver", &format!("{} %A", site.program()));
            site.attributes("* merge=x\n");
            commit(&site.worktree, "a.txt", "mine\n");
            commit(&site.repo, ".gitattributes", "* merge=x\n");
            commit(&site.repo, "a.txt", "yours\n");
        },
        |site| {
            plain_git(&site.worktree, &["merge", "-q", "--no-edit", "main"]);
            plain_git(&site.worktree, &["reset", "-q", "--hard", "ORIG_HEAD"]);
        };
    a_file_system_monitor_of_the_repository_is_not_run:
        |site| site.config("core.fsmonitor", &site.program()),
        |site| plain_git(&site.worktree, &["status"]);
    hooks_of_the_repository_are_not_run:
        |site| {
            let program = site.program();
            for name in [
                "post-checkout", "pre-commit", "commit-msg", "pre-merge-commit", "post-merge", "post-index-change",
                "reference-transaction", "prepare-commit-msg", "post-commit", "post-rewrite",
            ] {
                let text = std::fs::read_to_string(&program).unwrap();
                write_program(&site.repo.join(".git/hooks").join(name), &text);
            }
        },
        |site| plain_git(&site.worktree, &["commit", "--allow-empty", "-m", "x"]);
    a_folder_of_hooks_that_the_repository_names_is_not_used:
        |site| {
            let text = std::fs::read_to_string(site.program()).unwrap();
            write_program(&site.outside.join("hooks/pre-commit"), &text);
            write_program(&site.outside.join("hooks/post-checkout"), &text);
            site.config("core.hooksPath", site.outside.join("hooks").to_str().unwrap());
        },
        |site| plain_git(&site.worktree, &["commit", "--allow-empty", "-m", "x"]);
    a_signing_program_of_the_repository_is_not_run:
        |site| {
            site.config("gpg.program", &site.program());
            site.config("commit.gpgSign", "true");
        },
        |site| plain_git(&site.worktree, &["commit", "--allow-empty", "-m", "x"]);
    a_configuration_that_the_repository_includes_is_not_read:
        |site| {
            let file = site.outside.join("included");
            std::fs::write(&file, format!("[core]\n\tfsmonitor = {}\n", site.program())).unwrap();
            site.config("include.path", file.to_str().unwrap());
            site.config("includeIf.gitdir:**.path", file.to_str().unwrap());
        },
        |site| plain_git(&site.worktree, &["status"]);
    the_configuration_of_one_worktree_is_not_read:
        |site| {
            site.config("extensions.worktreeConfig", "true");
            let text = format!("[core]\n\tfsmonitor = {}\n", site.program());
            std::fs::write(site.git_dir.join("config.worktree"), text).unwrap();
        },
        |site| plain_git(&site.worktree, &["status"]);
    nothing_is_run_in_a_submodule:
        |site| {
            let inner = site.worktree.join("inner");
            std::fs::create_dir(&inner).unwrap();
            plain_git(&inner, &["init", "-q"]);
            plain_git(&inner, &["config", "core.fsmonitor", &site.program()]);
            let identity = ["-c", "user.name=x", "-c", "user.email=x@x", "-c", "core.fsmonitor=false"];
            plain_git(&inner, &[&identity[..], &["commit", "-q", "--allow-empty", "-m", "x"]].concat());
            let head = git(&inner, &["-c", "core.fsmonitor=false", "rev-parse", "HEAD"]);
            let entry = format!("160000,{head},inner");
            plain_git(&site.worktree, &["update-index", "--add", "--cacheinfo", &entry]);
            let modules = "[submodule \"inner\"]\n\tpath = inner\n\turl = ./inner\n\tignore = none\n";
            std::fs::write(site.worktree.join(".gitmodules"), modules).unwrap();
        },
        |site| plain_git(&site.worktree, &["status"]);
    a_missing_object_is_not_fetched_by_the_repositorys_ssh_command:
        |site| {
            site.config("core.sshCommand", &site.program());
            miss_an_object(site, "ssh://example.invalid/x");
        },
        |site| plain_git(&site.worktree, &["diff", "HEAD~1", "HEAD"]);
    a_missing_object_is_not_fetched_by_a_transport_of_the_repository:
        |site| {
            site.config("protocol.ext.allow", "always");
            miss_an_object(site, &format!("ext::{} x", site.program()));
        },
        |site| plain_git(&site.worktree, &["diff", "HEAD~1", "HEAD"]);
}

/// Commits a file whose content is missing, and names a remote from which git would fetch it.
fn miss_an_object(site: &TrapSite, url: &str) {
    let tree = &site.worktree;
    let input = site.outside.join("tree");
    std::fs::write(&input, format!("100644 blob {}\tmissing.txt\n", "1".repeat(40))).unwrap();
    let listed = std::fs::File::open(&input).unwrap();
    let made = Command::new("git").arg("-C").arg(tree).args(["mktree", "--missing"]).stdin(listed).output();
    let made = String::from_utf8(made.unwrap().stdout).unwrap();
    let new = git(tree, &["commit-tree", "-p", "HEAD", "-m", "x", made.trim()]);
    git(tree, &["update-ref", "HEAD", &new]);
    site.config("remote.origin.url", url);
    site.config("remote.origin.promisor", "true");
    site.config("core.repositoryFormatVersion", "1");
    site.config("extensions.partialClone", "origin");
}

/// A worktree in which the agent put a repository of its own in the place of git's pointer.
async fn with_changed_pointer(daemon: &TestDaemon) -> (TestSession, TrapSite) {
    let repo = repository(daemon);
    let (session, worktree) = in_worktree(daemon).await;
    session.run_script(&[write("new.txt", "new\n")]).await;
    let outside = daemon.home.sibling_path("outside");
    let own = outside.join("own");
    std::fs::create_dir_all(&own).unwrap();
    let git_dir = repo.join(".git/worktrees").join(&session.id);
    let site = TrapSite { repo, worktree, git_dir, outside };
    git(&own, &["init", "-q"]);
    git(&own, &["config", "filter.x.clean", &site.program()]);
    site.attributes("* filter=x\n");
    std::fs::write(site.worktree.join(".git"), format!("gitdir: {}/.git\n", own.display())).unwrap();
    plain_git(&site.worktree, &["add", "--all", "--dry-run"]);
    assert!(site.marker().exists(), "the trap does not work against plain git");
    std::fs::remove_file(site.marker()).unwrap();
    (session, site)
}

#[tokio::test]
async fn a_changed_pointer_is_reported_and_refused() {
    let daemon = TestDaemon::start().await;
    let (session, site) = with_changed_pointer(&daemon).await;
    let refusal = session.client.get(&session.path("/diff")).await;
    let details = refusal.expect_refusal(409, "worktree_changed");
    assert_eq!(details["file"], site.worktree.join(".git").to_str().unwrap());
    assert_eq!(details["expected"], site.git_dir.to_str().unwrap());
    session.client.post(&session.path("/merge"), &json!({})).await.expect_refusal(409, "worktree_changed");
    let all = daemon.client().get("/v1/worktrees?lines=true").await.list();
    assert_eq!(all[0]["state"], "unknown");
    assert!(all[0]["problem"].as_str().unwrap().contains("was changed"), "{}", all[0]);
    let shown = daemon.qd(&["worktrees"]).await;
    assert!(shown.stderr.contains(".git was changed"), "{}", shown.stderr);
    kill_worker(&daemon, &session).await;
    let run = session.run_script(&[say("again")]).await;
    assert_eq!(run["error"]["code"], "worktree_failed", "{run}");
    // What the message says restores it.
    let message = refusal.json()["error"]["message"].as_str().unwrap().to_owned();
    let text = message.split('`').nth(1).unwrap();
    assert_eq!(text, format!("gitdir: {}", site.git_dir.display()));
    std::fs::write(site.worktree.join(".git"), text).unwrap();
    session.client.get(&session.path("/diff")).await.expect(200);
    assert!(!site.marker().exists());
}

#[tokio::test]
async fn a_worktree_with_a_changed_pointer_is_removed_only_by_force() {
    let daemon = TestDaemon::start().await;
    let (session, site) = with_changed_pointer(&daemon).await;
    close(&session).await;
    session.client.delete(&session.path("/worktree")).await.expect_refusal(409, "worktree_changed");
    assert!(site.worktree.join("new.txt").exists());
    session.client.delete(&session.path("/worktree?force=true")).await.expect(200);
    assert!(!site.worktree.exists() && !site.git_dir.exists());
    assert!(!site.marker().exists());
}

#[tokio::test]
async fn gits_own_files_about_a_worktree_must_be_as_they_were() {
    let daemon = TestDaemon::start().await;
    let repo = repository(&daemon);
    let (session, path) = in_worktree(&daemon).await;
    session.run_script(&[write("new.txt", "new\n")]).await;
    let git_dir = repo.join(".git/worktrees").join(&session.id);
    for name in ["commondir", "gitdir"] {
        let text = std::fs::read_to_string(git_dir.join(name)).unwrap();
        std::fs::write(git_dir.join(name), "/tmp/elsewhere/.git\n").unwrap();
        session.client.get(&session.path("/diff")).await.expect_refusal(409, "worktree_changed");
        std::fs::write(git_dir.join(name), text).unwrap();
    }
    session.client.get(&session.path("/diff")).await.expect(200);
    // A symbolic link in the place of the worktree leads to something that is not ours.
    let elsewhere = daemon.home.sibling_path("elsewhere");
    std::fs::rename(&path, &elsewhere).unwrap();
    std::os::unix::fs::symlink(&elsewhere, &path).unwrap();
    session.client.get(&session.path("/diff")).await.expect_refusal(409, "no_worktree");
}

/// Replaces a path in an index by another of the same length.
fn rename_in_index(index: &Path, from: &str, to: &str) {
    let bytes = std::fs::read(index).unwrap();
    let mut content = bytes[..bytes.len() - 20].to_vec();
    let at = content.windows(from.len()).position(|window| window == from.as_bytes()).unwrap();
    content.splice(at..at + from.len(), to.bytes());
    std::fs::write(index, &content).unwrap();
    // An index ends with its digest.
    let digest = Command::new("sha1sum").arg(index).output().unwrap().stdout;
    let digest = std::str::from_utf8(&digest[..40]).unwrap();
    content.extend((0..20).map(|at| u8::from_str_radix(&digest[2 * at..2 * at + 2], 16).unwrap()));
    std::fs::write(index, content).unwrap();
}

#[tokio::test]
async fn an_index_cannot_make_the_daemon_read_its_own_token() {
    let daemon = TestDaemon::start_with(|options| {
        options.tcp();
    })
    .await;
    let repo = repository(&daemon);
    let (session, path) = in_worktree(&daemon).await;
    session.run_script(&[write("aaaatoken.a", "x\n")]).await;
    commit(&path, "aaaatoken.a", "x\n");
    let index = repo.join(".git/worktrees").join(&session.id).join("index");
    rename_in_index(&index, "aaaatoken.a", "../../token");
    let secret = daemon.token();
    let file = daemon.home.path().join("token");
    let object = git(&repo, &["hash-object", file.to_str().unwrap()]);
    let plain = Command::new("git").arg("-C").arg(&path).args(["diff", "HEAD"]).output().unwrap();
    assert!(
        String::from_utf8_lossy(&plain.stdout).contains(&secret),
        "the trap does not work against plain git"
    );
    session.client.get(&session.path("/diff")).await.expect_refusal(409, "worktree_changed");
    session.client.post(&session.path("/merge"), &json!({})).await.expect_refusal(409, "worktree_changed");
    let exists = Command::new("git").arg("-C").arg(&repo).args(["cat-file", "-e", &object]).status().unwrap();
    assert!(!exists.success(), "the token is in the repository");
}

#[tokio::test]
async fn a_directory_that_only_claims_to_be_a_checkout_is_not_written_to() {
    let daemon = TestDaemon::start().await;
    let repo = repository(&daemon);
    git(&repo, &["checkout", "-q", "-b", "elsewhere"]);
    let session = daemon.session_with(json!({ "agent": "script", "worktree": true })).await;
    session.run_script(&[write("new.txt", "new\n")]).await;
    let victim = daemon.home.sibling_path("victim");
    std::fs::create_dir_all(&victim).unwrap();
    let claim = repo.join(".git/worktrees/claim");
    std::fs::create_dir_all(&claim).unwrap();
    std::fs::write(claim.join("gitdir"), format!("{}/.git\n", victim.display())).unwrap();
    std::fs::write(claim.join("commondir"), "../..\n").unwrap();
    std::fs::write(claim.join("HEAD"), "ref: refs/heads/main\n").unwrap();
    std::fs::copy(repo.join(".git/index"), claim.join("index")).unwrap();
    let merged = session.client.post(&session.path("/merge"), &json!({ "into": "main" })).await.expect(200);
    assert_eq!((&merged["moved"], &merged["checkout"]), (&json!(true), &Value::Null));
    assert_eq!(std::fs::read_dir(&victim).unwrap().count(), 0);
}

#[tokio::test]
async fn a_repository_cannot_name_another_directory_as_its_work_tree() {
    let daemon = TestDaemon::start().await;
    let repo = repository(&daemon);
    git(&repo, &["config", "core.worktree", repo.parent().unwrap().to_str().unwrap()]);
    let workspace = daemon.workspace().await;
    let refusal = workspace.try_session(json!({ "agent": "script", "worktree": true })).await;
    refusal.expect_refusal(409, "git_refused");
    assert!(refusal.to_string().contains("core.worktree"), "{refusal}");
}

/// A filter like that of LFS: the repository stores another content than the work tree has.
#[tokio::test]
async fn a_filter_of_the_users_own_configuration_works() {
    let daemon = TestDaemon::start().await;
    let repo = repository(&daemon);
    let user = daemon.home.sibling_path("user");
    std::fs::create_dir_all(&user).unwrap();
    let text = "[filter \"shout\"]\n\tclean = tr a-z A-Z\n\tsmudge = tr A-Z a-z\n\trequired = true\n";
    std::fs::write(user.join(".gitconfig"), text).unwrap();
    let marker = daemon.home.sibling_path("it-ran");
    commit(&repo, ".gitattributes", "*.loud filter=shout\n");
    // Without the filter, the content is stored as it is.
    commit(&repo, "first.loud", "FIRST\n");
    // The repository cannot redefine the filter.
    for name in ["clean", "smudge", "process"] {
        let program = format!("touch {}; cat", marker.display());
        git(&repo, &["config", &format!("filter.shout.{name}"), &program]);
    }
    let (session, path) = in_worktree(&daemon).await;
    session.run_script(&[write("second.loud", "second\n")]).await;
    assert_eq!(std::fs::read_to_string(path.join("first.loud")).unwrap(), "first\n");
    let diff = session.client.get(&session.path("/diff")).await.expect(200);
    assert!(diff["patch"].as_str().unwrap().contains("+SECOND"), "{diff}");
    session.client.post(&session.path("/merge"), &json!({ "into": "main" })).await.expect(200);
    assert_eq!(git(&repo, &["show", "main:second.loud"]), "SECOND");
    assert_eq!(std::fs::read_to_string(repo.join("second.loud")).unwrap(), "second\n");
    assert!(!marker.exists());
}

/// Earlier releases had their record in git's directory of the worktree.
#[tokio::test]
async fn a_worktree_of_an_earlier_release_is_used_as_it_is() {
    let mut daemon = TestDaemon::start().await;
    let repo = repository(&daemon);
    let (session, path) = in_worktree(&daemon).await;
    session.run_script(&[write("new.txt", "new\n")]).await;
    let base = git(&repo, &["rev-parse", "main"]);
    let git_dir = repo.join(".git/worktrees").join(&session.id);
    let record =
        json!({ "branch": format!("qd/{}", session.id), "base": base, "target": "main", "set_up": true });
    daemon.terminate().await;
    std::fs::remove_dir_all(daemon.home.path().join("git")).unwrap();
    std::fs::write(git_dir.join("quarterdeck.json"), record.to_string()).unwrap();
    daemon.start_again().await;
    let diff = session.client.get(&session.path("/diff")).await.expect(200);
    assert_eq!(diff["files"][0]["path"], "new.txt");
    assert_eq!(session.run_script(&[read("new.txt")]).await["text"], "new\n");
    assert_eq!(path_of(&session).await, path);
    poll_until("the record", async || {
        daemon.home.path().join("git/worktrees").join(format!("{}.json", session.id)).exists().then_some(())
    })
    .await;
    session.client.post(&session.path("/merge"), &json!({})).await.expect(200);
}
