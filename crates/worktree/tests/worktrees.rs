//! Worktrees with real git in temporary directories: what must never be lost, what a crash may leave, and what is refused.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use qd_protocol::worktree::WorktreeStatus;
use qd_worktree::merge::{MergeOptions, MergeOutcome};
use qd_worktree::{
    GitWorktree, Repository, StopFlag, WorktreeError, WorktreePlan, ignored_files, overlap, remove,
};

/// A repository with one commit on `main`, and room for worktrees beside it.
struct TestRepository {
    dir: tempfile::TempDir,
}

impl TestRepository {
    fn new() -> Self {
        let world = Self { dir: tempfile::tempdir().unwrap() };
        fs::create_dir(world.repo()).unwrap();
        world.git(&["init", "-q", "-b", "main"]);
        world.git(&["config", "user.name", "A Person"]);
        world.git(&["config", "user.email", "person@example.invalid"]);
        world.commit("a.txt", "one\ntwo\nthree\nfour\nfive\nsix\nseven\n");
        world
    }

    fn path(&self) -> PathBuf {
        self.dir.path().canonicalize().unwrap()
    }

    fn repo(&self) -> PathBuf {
        self.path().join("repo")
    }

    fn git(&self, args: &[&str]) -> String {
        git(&self.repo(), args)
    }

    fn commit(&self, file: &str, content: &str) -> String {
        commit(&self.repo(), file, content)
    }

    fn plan(&self, name: &str) -> WorktreePlan {
        self.plan_from(name, None)
    }

    fn plan_from(&self, name: &str, base: Option<&str>) -> WorktreePlan {
        let stop = StopFlag::default();
        let origin = Repository::of(&self.repo(), &stop).unwrap().worktree_origin(base, &stop).unwrap();
        WorktreePlan {
            repository: self.repo(),
            path: self.path().join("worktrees").join(name),
            branch: format!("qd/{name}"),
            base: origin.base,
            target: origin.target,
        }
    }

    fn tree(&self, name: &str) -> GitWorktree {
        self.plan(name).create(None, &StopFlag::default()).unwrap()
    }

    fn merge(
        &self,
        tree: &GitWorktree,
        into: Option<&str>,
        squash: bool,
    ) -> Result<MergeOutcome, WorktreeError> {
        let scratch = self.path().join("scratch");
        let merge = MergeOptions { into, squash, message: "Merge the session", scratch: &scratch };
        let done = tree.merge(&merge);
        assert!(!scratch.exists(), "a scratch worktree is left behind");
        assert!(!self.git(&["worktree", "list"]).contains("scratch"));
        done
    }
}

fn git(dir: &Path, args: &[&str]) -> String {
    let mut command = Command::new("git");
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("GIT_")) {
        command.env_remove(name);
    }
    command.env("GIT_CONFIG_NOSYSTEM", "1").env("GIT_CONFIG_GLOBAL", "/dev/null");
    let out = command.arg("-C").arg(dir).args(args).output().unwrap();
    assert!(out.status.success(), "git {args:?}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).unwrap().trim_end().to_owned()
}

fn commit(dir: &Path, file: &str, content: &str) -> String {
    fs::write(dir.join(file), content).unwrap();
    git(dir, &["add", "--all"]);
    git(dir, &["commit", "-q", "-m", file]);
    git(dir, &["rev-parse", "HEAD"])
}

fn state(tree: &GitWorktree) -> WorktreeStatus {
    tree.summarize().unwrap().state
}

#[test]
fn a_worktree_begins_at_what_is_checked_out_on_a_branch_of_its_own() {
    let world = TestRepository::new();
    let tree = world.tree("s1");
    assert_eq!(git(&tree.path, &["symbolic-ref", "--short", "HEAD"]), "qd/s1");
    assert_eq!(
        fs::read_to_string(tree.path.join("a.txt")).unwrap(),
        fs::read_to_string(world.repo().join("a.txt")).unwrap()
    );
    assert_eq!(tree.record.target.as_deref(), Some("main"));
    assert_eq!(state(&tree), WorktreeStatus::Clean);
    assert_eq!(world.git(&["status", "--porcelain"]), "", "the user's checkout is as it was");
}

#[test]
fn a_worktree_begins_at_the_branch_that_is_named() {
    let world = TestRepository::new();
    let main = world.git(&["rev-parse", "main"]);
    world.git(&["checkout", "-q", "-b", "other"]);
    world.commit("b.txt", "b\n");
    let plan = world.plan_from("s1", Some("main"));
    assert_eq!((plan.base.as_str(), plan.target.as_deref()), (main.as_str(), Some("main")));
    let stop = StopFlag::default();
    for name in ["nosuch", "--force", "a..b", "", "a b", "main~1"] {
        let repository = Repository::of(&world.repo(), &stop).unwrap();
        let error = repository.worktree_origin(Some(name), &stop).unwrap_err();
        assert!(matches!(error, WorktreeError::NoBranch { .. }), "{name}: {error}");
    }
}

#[test]
fn a_directory_outside_git_is_refused_and_stays_one() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("file"), "x").unwrap();
    let error = Repository::of(dir.path(), &StopFlag::default()).unwrap_err();
    assert!(matches!(error, WorktreeError::NotARepository(_)), "{error}");
    assert!(!dir.path().join(".git").exists());
    let bare = dir.path().join("bare.git");
    git(dir.path(), &["init", "-q", "--bare", bare.to_str().unwrap()]);
    assert!(matches!(Repository::of(&bare, &StopFlag::default()), Err(WorktreeError::BareRepository(_))));
    let empty = dir.path().join("empty");
    git(dir.path(), &["init", "-q", empty.to_str().unwrap()]);
    let empty = Repository::of(&empty, &StopFlag::default()).unwrap();
    assert!(matches!(empty.worktree_origin(None, &StopFlag::default()), Err(WorktreeError::NoCommit(_))));
}

#[test]
fn a_subdirectory_and_a_linked_checkout_know_their_repository() {
    let world = TestRepository::new();
    fs::create_dir_all(world.repo().join("deep/er")).unwrap();
    let found = Repository::of(&world.repo().join("deep/er"), &StopFlag::default()).unwrap();
    assert_eq!((found.top, found.prefix), (world.repo(), PathBuf::from("deep/er")));
    let tree = world.tree("s1");
    let linked = Repository::of(&tree.path, &StopFlag::default()).unwrap();
    assert_eq!((linked.top, linked.common_dir), (tree.path, world.repo().join(".git")));
}

#[test]
fn making_it_again_keeps_all_work() {
    let world = TestRepository::new();
    let plan = world.plan("s1");
    let tree = plan.create(None, &StopFlag::default()).unwrap();
    commit(&tree.path, "b.txt", "committed");
    fs::write(tree.path.join("c.txt"), "not committed").unwrap();
    fs::write(tree.path.join("a.txt"), "changed").unwrap();
    world.commit("later.txt", "main moves on");
    let again = plan.create(None, &StopFlag::default()).unwrap();
    assert_eq!(fs::read_to_string(again.path.join("c.txt")).unwrap(), "not committed");
    assert_eq!(fs::read_to_string(again.path.join("a.txt")).unwrap(), "changed");
    assert!(again.path.join("b.txt").exists() && !again.path.join("later.txt").exists());
}

#[test]
fn whatever_a_crash_left_is_finished() {
    let world = TestRepository::new();
    let stop = StopFlag::default();
    // The branch alone.
    let plan = world.plan("s1");
    world.git(&["branch", "qd/s1", &plan.base]);
    plan.create(None, &stop).unwrap();
    // An empty directory.
    let plan = world.plan("s2");
    fs::create_dir_all(&plan.path).unwrap();
    plan.create(None, &stop).unwrap();
    // Git's folder, locked, without the files, and an index that somebody held.
    let plan = world.plan("s3");
    let path = plan.path.to_str().unwrap();
    world.git(&["worktree", "add", "-q", "--no-checkout", "--lock", "-b", "qd/s3", path]);
    fs::write(world.repo().join(".git/worktrees/s3/index.lock"), "").unwrap();
    let tree = plan.create(None, &stop).unwrap();
    assert_eq!((state(&tree), tree.path.join("a.txt").exists()), (WorktreeStatus::Clean, true));
    tree.remove(false).unwrap();
    // A pointer that leads nowhere.
    let plan = world.plan("s4");
    fs::create_dir_all(&plan.path).unwrap();
    fs::write(plan.path.join(".git"), "gitdir: /nowhere/at/all\n").unwrap();
    assert_eq!(state(&plan.create(None, &stop).unwrap()), WorktreeStatus::Clean);
    // The directory is gone, and the branch has what was committed.
    let plan = world.plan("s5");
    let tree = plan.create(None, &stop).unwrap();
    commit(&tree.path, "kept.txt", "work");
    fs::remove_dir_all(&tree.path).unwrap();
    assert!(plan.create(None, &stop).unwrap().path.join("kept.txt").exists());
}

#[test]
fn what_is_in_the_way_is_never_removed() {
    let world = TestRepository::new();
    let stop = StopFlag::default();
    let plan = world.plan("s1");
    fs::create_dir_all(&plan.path).unwrap();
    fs::write(plan.path.join("precious"), "x").unwrap();
    assert!(matches!(plan.create(None, &stop), Err(WorktreeError::PathOccupied { .. })));
    assert!(plan.path.join("precious").exists());
    // A repository of somebody's own is not ours either.
    let plan = world.plan("s2");
    fs::create_dir_all(&plan.path).unwrap();
    git(&plan.path, &["init", "-q"]);
    assert!(matches!(plan.create(None, &stop), Err(WorktreeError::PathOccupied { .. })));
    // A branch that somebody looks at.
    let plan = world.plan("s3");
    world.git(&["checkout", "-q", "-b", "qd/s3"]);
    assert!(matches!(plan.create(None, &stop), Err(WorktreeError::BranchInUse { .. })));
}

#[test]
fn hooks_of_the_repository_are_not_run() {
    let world = TestRepository::new();
    let hooks = world.repo().join(".git/hooks");
    fs::create_dir_all(&hooks).unwrap();
    for name in [
        "post-checkout",
        "pre-commit",
        "commit-msg",
        "pre-merge-commit",
        "post-merge",
        "reference-transaction",
    ] {
        let hook = hooks.join(name);
        fs::write(&hook, "#!/bin/sh\ntouch \"$(git rev-parse --git-common-dir)/hooked\"\nexit 1\n").unwrap();
        let mut mode = fs::metadata(&hook).unwrap().permissions();
        std::os::unix::fs::PermissionsExt::set_mode(&mut mode, 0o755);
        fs::set_permissions(&hook, mode).unwrap();
    }
    let tree = world.tree("s1");
    fs::write(tree.path.join("b.txt"), "b").unwrap();
    world.merge(&tree, None, false).unwrap();
    tree.remove(false).unwrap();
    assert!(!world.repo().join(".git/hooked").exists());
}

#[test]
fn a_worktree_with_work_is_not_removed() {
    let world = TestRepository::new();
    let tree = world.tree("s1");
    fs::write(tree.path.join("new.txt"), "x").unwrap();
    assert_eq!(state(&tree), WorktreeStatus::Dirty);
    let path = tree.path.clone();
    let error = tree.remove(false).unwrap_err();
    assert!(matches!(error, WorktreeError::Unmerged { state: WorktreeStatus::Dirty, .. }), "{error}");
    assert!(path.join("new.txt").exists());
    commit(&path, "new.txt", "x");
    let tree = GitWorktree::open(&path, &StopFlag::default()).unwrap();
    assert_eq!((state(&tree), tree.summarize().unwrap().ahead), (WorktreeStatus::Ahead, 1));
    assert!(matches!(tree.remove(false), Err(WorktreeError::Unmerged { state: WorktreeStatus::Ahead, .. })));
    assert!(path.exists());
    // With force the files go, and the commits stay.
    let tree = GitWorktree::open(&path, &StopFlag::default()).unwrap();
    assert_eq!(tree.remove(true).unwrap().as_deref(), Some("qd/s1"));
    assert!(!path.exists());
    assert_eq!(world.git(&["show", "qd/s1:new.txt"]), "x");
}

#[test]
fn commits_without_a_branch_count_as_work() {
    let world = TestRepository::new();
    let tree = world.tree("s1");
    git(&tree.path, &["checkout", "-q", "--detach"]);
    commit(&tree.path, "b.txt", "b");
    assert_eq!(state(&tree), WorktreeStatus::Ahead);
    // What another session's branch holds is not safe with it: that may go as well.
    world.git(&["branch", "qd/s2", &git(&tree.path, &["rev-parse", "HEAD"])]);
    assert_eq!(state(&tree), WorktreeStatus::Ahead);
    world.git(&["branch", "kept", "qd/s2"]);
    assert_eq!(state(&tree), WorktreeStatus::Merged);
}

#[test]
fn a_merge_commits_what_was_not_and_moves_the_checkout_along() {
    let world = TestRepository::new();
    let tree = world.tree("s1");
    fs::write(tree.path.join("new.txt"), "work\n").unwrap();
    fs::write(tree.path.join("a.txt"), "one\n2\nthree\nfour\nfive\nsix\nseven\n").unwrap();
    world.commit("main.txt", "meanwhile\n");
    fs::write(world.repo().join("untracked"), "mine").unwrap();
    let done = world.merge(&tree, None, false).unwrap();
    assert!(done.has_moved && done.committed.is_some());
    assert_eq!(done.checkout, Some(world.repo()));
    assert_eq!(world.git(&["rev-parse", "main"]), done.commit);
    assert_eq!(fs::read_to_string(world.repo().join("new.txt")).unwrap(), "work\n");
    assert!(fs::read_to_string(world.repo().join("a.txt")).unwrap().contains("\n2\n"));
    assert!(world.repo().join("main.txt").exists());
    assert_eq!(world.git(&["status", "--porcelain"]), "?? untracked");
    assert_eq!(state(&tree), WorktreeStatus::Merged);
    // Again there is nothing to do.
    let again = world.merge(&tree, None, false).unwrap();
    assert!(!again.has_moved && again.committed.is_none());
    let path = tree.path.clone();
    assert_eq!(tree.remove(false).unwrap(), None);
    assert!(!path.exists() && world.git(&["branch", "--list", "qd/*"]).is_empty());
}

/// Git tells times by the second and sizes by the byte; a change that differs in neither it must be made to look at.
#[test]
fn a_change_of_the_same_size_in_the_same_second_is_merged_too() {
    let world = TestRepository::new();
    world.commit("a", "one\n");
    let tree = world.tree("s1");
    fs::write(tree.path.join("a"), "two\n").unwrap();
    // Into the next second, or nothing is proved.
    std::thread::sleep(std::time::Duration::from_millis(1100));
    assert!(world.merge(&tree, None, false).unwrap().has_moved);
    assert_eq!(fs::read_to_string(world.repo().join("a")).unwrap(), "two\n");
    assert_eq!(state(&tree), WorktreeStatus::Merged);
}

#[test]
fn a_squash_is_one_commit_and_counts_as_merged() {
    let world = TestRepository::new();
    let tree = world.tree("s1");
    commit(&tree.path, "b.txt", "b");
    commit(&tree.path, "c.txt", "c");
    let before: u32 = world.git(&["rev-list", "--count", "main"]).parse().unwrap();
    world.merge(&tree, None, true).unwrap();
    let after: u32 = world.git(&["rev-list", "--count", "main"]).parse().unwrap();
    assert_eq!(after, before + 1);
    assert_eq!(state(&tree), WorktreeStatus::Merged);
    tree.remove(false).unwrap();
}

#[test]
fn a_conflict_shows_its_places_and_changes_nothing() {
    let world = TestRepository::new();
    let tree = world.tree("s1");
    fs::write(tree.path.join("a.txt"), "one\nMINE\nthree\nfour\nfive\nsix\nseven\n").unwrap();
    fs::write(tree.path.join("new.txt"), "new").unwrap();
    git(&tree.path, &["add", "a.txt"]);
    world.commit("a.txt", "one\nYOURS\nthree\nfour\nfive\nsix\nseven\n");
    let before = (world.git(&["for-each-ref"]), git(&tree.path, &["status", "--porcelain"]));
    let error = world.merge(&tree, None, false).unwrap_err();
    let WorktreeError::Conflicts { conflicts, .. } = &error else { panic!("{error}") };
    assert_eq!((conflicts.len(), conflicts[0].path.as_str()), (1, "a.txt"));
    assert!(conflicts[0].hunks.contains("MINE") && conflicts[0].hunks.contains("YOURS"), "{conflicts:?}");
    let after = (world.git(&["for-each-ref"]), git(&tree.path, &["status", "--porcelain"]));
    assert_eq!(before, after);
    assert_eq!(world.git(&["status", "--porcelain"]), "");
}

#[test]
fn a_checkout_with_changes_is_not_touched() {
    let world = TestRepository::new();
    let tree = world.tree("s1");
    commit(&tree.path, "b.txt", "b");
    fs::write(world.repo().join("a.txt"), "mine").unwrap();
    let error = world.merge(&tree, None, false).unwrap_err();
    assert!(matches!(error, WorktreeError::CheckoutDirty { .. }), "{error}");
    assert_eq!(fs::read_to_string(world.repo().join("a.txt")).unwrap(), "mine");
    // Another branch can still be merged into: nobody has it checked out.
    world.git(&["branch", "release"]);
    let done = world.merge(&tree, Some("release"), false).unwrap();
    assert_eq!(done.checkout, None);
    assert_eq!(world.git(&["rev-parse", "release"]), done.commit);
    assert_eq!(world.git(&["status", "--porcelain"]), " M a.txt");
}

#[test]
fn a_file_in_the_way_of_the_checkout_is_kept() {
    let world = TestRepository::new();
    let tree = world.tree("s1");
    commit(&tree.path, "b.txt", "theirs");
    fs::write(world.repo().join("b.txt"), "mine").unwrap();
    let before = world.git(&["rev-parse", "main"]);
    assert!(matches!(world.merge(&tree, None, false), Err(WorktreeError::BranchMoved { .. })));
    assert_eq!(fs::read_to_string(world.repo().join("b.txt")).unwrap(), "mine");
    assert_eq!(world.git(&["rev-parse", "main"]), before);
}

#[test]
fn what_a_merge_cannot_do_well_is_refused() {
    let world = TestRepository::new();
    let tree = world.tree("s1");
    assert!(matches!(world.merge(&tree, Some("nosuch"), false), Err(WorktreeError::NoBranch { .. })));
    assert!(matches!(world.merge(&tree, Some("-x"), false), Err(WorktreeError::NoBranch { .. })));
    // A repository inside: a commit would hold nothing of it.
    let inner = tree.path.join("vendor/inner");
    fs::create_dir_all(&inner).unwrap();
    git(&inner, &["init", "-q"]);
    git(&inner, &["-c", "user.name=x", "-c", "user.email=x@x", "commit", "-q", "--allow-empty", "-m", "x"]);
    let error = world.merge(&tree, None, false).unwrap_err();
    assert!(matches!(&error, WorktreeError::EmbeddedRepository(name) if name == "vendor/inner/"), "{error}");
    fs::remove_dir_all(tree.path.join("vendor")).unwrap();
    // In the middle of something.
    commit(&tree.path, "a.txt", "mine");
    world.commit("a.txt", "yours");
    let merge = Command::new("git").arg("-C").arg(&tree.path).args(["merge", "-q", "main"]).output().unwrap();
    assert!(!merge.status.success());
    assert!(matches!(world.merge(&tree, None, false), Err(WorktreeError::Unfinished { .. })));
}

#[test]
fn a_diff_has_everything_that_is_committed_or_not() {
    let world = TestRepository::new();
    let tree = world.tree("s1");
    commit(&tree.path, "b.txt", "b\n");
    fs::write(tree.path.join("new file.txt"), "n\n").unwrap();
    fs::remove_file(tree.path.join("a.txt")).unwrap();
    world.commit("main.txt", "is not the session's\n");
    let status = git(&tree.path, &["status", "--porcelain"]);
    let diff = tree.diff(true).unwrap();
    let names: Vec<_> = diff.files.iter().map(|file| file.path.as_str()).collect();
    assert_eq!(names, ["a.txt", "b.txt", "new file.txt"]);
    assert_eq!((diff.files[0].removed, diff.files[2].added), (Some(7), Some(1)));
    let patch = diff.patch.unwrap();
    assert!(patch.contains("+++ b/new file.txt") && patch.contains("+b"), "{patch}");
    assert!(diff.uncommitted && !diff.truncated);
    assert_eq!(git(&tree.path, &["status", "--porcelain"]), status, "the index is as it was");
    assert!(tree.diff(false).unwrap().patch.is_none());
}

#[test]
fn two_that_changed_the_same_lines_are_found() {
    let world = TestRepository::new();
    let (one, two, three) = (world.tree("s1"), world.tree("s2"), world.tree("s3"));
    fs::write(one.path.join("a.txt"), "one\n2\nthree\nfour\nfive\nsix\nseven\n").unwrap();
    commit(&two.path, "a.txt", "one\nzwei\ndrei\nfour\nfive\nsix\nseven\n");
    fs::write(three.path.join("a.txt"), "one\ntwo\nthree\nfour\nfive\nsix\n7\n").unwrap();
    fs::write(one.path.join("new.txt"), "x\n").unwrap();
    fs::write(three.path.join("new.txt"), "y\n").unwrap();
    let found = overlap::find_overlaps(&[one, two, three]).unwrap();
    assert_eq!(found.len(), 2, "{found:?}");
    assert_eq!((found[0].0, found[0].1, found[0].2[0].path.as_str()), (0, 1, "a.txt"));
    assert_eq!((found[0].2[0].lines[0].first, found[0].2[0].lines[0].last), (2, 2));
    assert_eq!((found[1].0, found[1].1, found[1].2[0].path.as_str()), (0, 2, "new.txt"));
}

#[test]
fn ignored_files_are_brought_and_nothing_leads_out() {
    let world = TestRepository::new();
    world.commit(".gitignore", ".env\n*.local\nsecret\n");
    let outside = world.path().join("outside");
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("x.local"), "outside").unwrap();
    let repo = world.repo();
    fs::create_dir(repo.join("config")).unwrap();
    fs::write(repo.join("config/a.local"), "a").unwrap();
    fs::write(repo.join("config/plain.txt"), "not ignored").unwrap();
    fs::write(repo.join(".env"), "KEY=1").unwrap();
    std::os::unix::fs::symlink(&outside, repo.join("linked")).unwrap();
    std::os::unix::fs::symlink(outside.join("x.local"), repo.join("link.local")).unwrap();
    let tree = world.tree("s1");
    let patterns: Vec<String> =
        [".env", "config/*", "linked/*", "*.local", "nosuch"].iter().map(|p| (*p).to_owned()).collect();
    let stop = StopFlag::default();
    let brought = ignored_files::copy_ignored_files(&patterns, &repo, &tree.path, &stop).unwrap();
    assert_eq!(brought.files, [".env", "config/a.local"]);
    assert!(brought.skipped.len() == 1 && brought.skipped[0].starts_with("config/plain.txt"), "{brought:?}");
    assert_eq!(fs::read_to_string(tree.path.join("config/a.local")).unwrap(), "a");
    assert!(!tree.path.join("linked").exists() && !tree.path.join("link.local").exists());
    assert_eq!(state(&tree), WorktreeStatus::Clean);
    // Again, and with what is there: it stays.
    fs::write(tree.path.join(".env"), "KEY=mine").unwrap();
    ignored_files::copy_ignored_files(&patterns, &repo, &tree.path, &stop).unwrap();
    assert_eq!(fs::read_to_string(tree.path.join(".env")).unwrap(), "KEY=mine");
    // A link in the worktree leads nobody out of it.
    let other = world.tree("s2");
    std::os::unix::fs::symlink(&outside, other.path.join("config")).unwrap();
    let brought = ignored_files::copy_ignored_files(&patterns, &repo, &other.path, &stop).unwrap();
    assert_eq!(brought.files, [".env"]);
    assert!(!outside.join("a.local").exists());
    let out = vec!["../outside/x.local".to_owned()];
    assert!(matches!(
        ignored_files::copy_ignored_files(&out, &repo, &tree.path, &stop),
        Err(WorktreeError::BadPattern { .. })
    ));
}

#[test]
fn one_whose_repository_is_gone_is_removed_only_by_force() {
    let world = TestRepository::new();
    let tree = world.tree("s1");
    let path = tree.path;
    fs::remove_dir_all(world.repo()).unwrap();
    assert!(matches!(GitWorktree::open(&path, &StopFlag::default()), Err(WorktreeError::NoWorktree(_))));
    assert!(matches!(remove::remove_unknown(&path, false), Err(WorktreeError::Unmerged { .. })));
    remove::remove_unknown(&path, true).unwrap();
    assert!(!path.exists());
}

#[test]
fn a_worktree_with_submodules_can_be_made_and_removed() {
    let world = TestRepository::new();
    let inner = TestRepository::new();
    let url = inner.repo().display().to_string();
    world.git(&["-c", "protocol.file.allow=always", "submodule", "--quiet", "add", &url, "inner"]);
    world.git(&["commit", "-q", "-m", "inner"]);
    let tree = world.tree("s1");
    assert!(tree.has_submodules());
    assert_eq!(state(&tree), WorktreeStatus::Clean);
    let path = tree.path.clone();
    tree.remove(false).unwrap();
    assert!(!path.exists());
}
