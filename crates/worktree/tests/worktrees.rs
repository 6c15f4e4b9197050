//! Tests of worktrees with real git in temporary directories: what must never be lost, what a crash may leave behind,
//! and what is refused.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use qd_protocol::worktree::WorktreeStatus;
use qd_testkit::git::{commit, git, make_repository};
use qd_worktree::merge::{MergeOptions, MergeOutcome};
use qd_worktree::{
    GitRecords, GitWorktree, Repository, StopFlag, WorktreeError, WorktreePlan, WorktreeResult,
    ignored_files, overlap, remove,
};

/// A repository with one commit on `main`, and space for worktrees next to it.
struct TestRepository {
    dir: tempfile::TempDir,
}

impl TestRepository {
    fn new() -> Self {
        let repository = Self { dir: tempfile::tempdir().unwrap() };
        make_repository(&repository.repo());
        repository
    }

    fn path(&self) -> PathBuf {
        self.dir.path().canonicalize().unwrap()
    }

    fn repo(&self) -> PathBuf {
        self.path().join("repo")
    }

    fn records(&self) -> GitRecords {
        GitRecords::in_folder(&self.path().join("records"))
    }

    /// The repository of a directory.
    fn find(&self, dir: &Path) -> WorktreeResult<Repository> {
        Repository::of(dir, &self.records(), &StopFlag::default())
    }

    fn open(&self, path: &Path) -> WorktreeResult<GitWorktree> {
        GitWorktree::open(path, &self.records(), &StopFlag::default())
    }

    fn create(&self, plan: &WorktreePlan) -> WorktreeResult<GitWorktree> {
        plan.create(&self.records(), None, &StopFlag::default())
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
        let origin = self.find(&self.repo()).unwrap().worktree_origin(base, &stop).unwrap();
        WorktreePlan {
            repository: self.repo(),
            path: self.path().join("worktrees").join(name),
            branch: format!("qd/{name}"),
            base: origin.base,
            target: origin.target,
        }
    }

    fn tree(&self, name: &str) -> GitWorktree {
        self.create(&self.plan(name)).unwrap()
    }

    fn merge(
        &self,
        tree: &GitWorktree,
        into: Option<&str>,
        squash: bool,
    ) -> Result<MergeOutcome, WorktreeError> {
        let scratch = self.path().join("scratch");
        let merge = MergeOptions { into, squash, message: "Merge the session", scratch: &scratch };
        let outcome = tree.merge(&merge);
        assert!(!scratch.exists(), "the scratch worktree was left behind");
        assert!(!self.git(&["worktree", "list"]).contains("scratch"));
        outcome
    }
}

fn state(tree: &GitWorktree) -> WorktreeStatus {
    tree.summarize().unwrap().state
}

#[test]
fn a_worktree_begins_at_what_is_checked_out_on_a_branch_of_its_own() {
    let repository = TestRepository::new();
    let tree = repository.tree("s1");
    assert_eq!(git(&tree.path, &["symbolic-ref", "--short", "HEAD"]), "qd/s1");
    assert_eq!(
        fs::read_to_string(tree.path.join("a.txt")).unwrap(),
        fs::read_to_string(repository.repo().join("a.txt")).unwrap()
    );
    assert_eq!(tree.record.target.as_deref(), Some("main"));
    assert_eq!(state(&tree), WorktreeStatus::Clean);
    assert_eq!(repository.git(&["status", "--porcelain"]), "", "the user's checkout is unchanged");
}

#[test]
fn a_worktree_begins_at_the_branch_that_is_named() {
    let repository = TestRepository::new();
    let main = repository.git(&["rev-parse", "main"]);
    repository.git(&["checkout", "-q", "-b", "other"]);
    repository.commit("b.txt", "b\n");
    let plan = repository.plan_from("s1", Some("main"));
    assert_eq!((plan.base.as_str(), plan.target.as_deref()), (main.as_str(), Some("main")));
    let stop = StopFlag::default();
    for name in ["nosuch", "--force", "a..b", "", "a b", "main~1"] {
        let checkout = repository.find(&repository.repo()).unwrap();
        let error = checkout.worktree_origin(Some(name), &stop).unwrap_err();
        assert!(matches!(error, WorktreeError::NoBranch { .. }), "{name}: {error}");
    }
}

#[test]
fn a_directory_outside_git_is_refused_and_stays_one() {
    let repository = TestRepository::new();
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("file"), "x").unwrap();
    let error = repository.find(dir.path()).unwrap_err();
    assert!(matches!(error, WorktreeError::NotARepository(_)), "{error}");
    assert!(!dir.path().join(".git").exists());
    let bare = dir.path().join("bare.git");
    git(dir.path(), &["init", "-q", "--bare", bare.to_str().unwrap()]);
    assert!(matches!(repository.find(&bare), Err(WorktreeError::BareRepository(_))));
    let empty = dir.path().join("empty");
    git(dir.path(), &["init", "-q", empty.to_str().unwrap()]);
    let empty = repository.find(&empty).unwrap();
    assert!(matches!(empty.worktree_origin(None, &StopFlag::default()), Err(WorktreeError::NoCommit(_))));
}

#[test]
fn a_subdirectory_and_a_linked_checkout_know_their_repository() {
    let repository = TestRepository::new();
    fs::create_dir_all(repository.repo().join("deep/er")).unwrap();
    let found = repository.find(&repository.repo().join("deep/er")).unwrap();
    assert_eq!((found.top, found.prefix), (repository.repo(), PathBuf::from("deep/er")));
    let tree = repository.tree("s1");
    let linked = repository.find(&tree.path).unwrap();
    assert_eq!((linked.top, linked.common_dir), (tree.path, repository.repo().join(".git")));
}

#[test]
fn creating_a_worktree_again_keeps_all_work() {
    let repository = TestRepository::new();
    let plan = repository.plan("s1");
    let tree = repository.create(&plan).unwrap();
    commit(&tree.path, "b.txt", "committed");
    fs::write(tree.path.join("c.txt"), "not committed").unwrap();
    fs::write(tree.path.join("a.txt"), "changed").unwrap();
    repository.commit("later.txt", "main moves on");
    let again = repository.create(&plan).unwrap();
    assert_eq!(fs::read_to_string(again.path.join("c.txt")).unwrap(), "not committed");
    assert_eq!(fs::read_to_string(again.path.join("a.txt")).unwrap(), "changed");
    assert!(again.path.join("b.txt").exists() && !again.path.join("later.txt").exists());
}

#[test]
fn whatever_a_crash_left_is_finished() {
    let repository = TestRepository::new();
    // Only the branch exists.
    let plan = repository.plan("s1");
    repository.git(&["branch", "qd/s1", &plan.base]);
    repository.create(&plan).unwrap();
    // The directory exists but is empty.
    let plan = repository.plan("s2");
    fs::create_dir_all(&plan.path).unwrap();
    repository.create(&plan).unwrap();
    // Git's directory exists and is locked; the files are missing and the index is locked.
    let plan = repository.plan("s3");
    let path = plan.path.to_str().unwrap();
    repository.git(&["worktree", "add", "-q", "--no-checkout", "--lock", "-b", "qd/s3", path]);
    fs::write(repository.repo().join(".git/worktrees/s3/index.lock"), "").unwrap();
    let tree = repository.create(&plan).unwrap();
    assert_eq!((state(&tree), tree.path.join("a.txt").exists()), (WorktreeStatus::Clean, true));
    tree.remove(false).unwrap();
    // A pointer to a git directory that does not exist.
    let plan = repository.plan("s4");
    fs::create_dir_all(&plan.path).unwrap();
    fs::write(plan.path.join(".git"), "gitdir: /nowhere/at/all\n").unwrap();
    assert_eq!(state(&repository.create(&plan).unwrap()), WorktreeStatus::Clean);
    // The directory is gone; the branch still has the commits.
    let plan = repository.plan("s5");
    let tree = repository.create(&plan).unwrap();
    commit(&tree.path, "kept.txt", "work");
    fs::remove_dir_all(&tree.path).unwrap();
    assert!(repository.create(&plan).unwrap().path.join("kept.txt").exists());
}

#[test]
fn what_is_in_the_way_is_never_removed() {
    let repository = TestRepository::new();
    let plan = repository.plan("s1");
    fs::create_dir_all(&plan.path).unwrap();
    fs::write(plan.path.join("precious"), "x").unwrap();
    assert!(matches!(repository.create(&plan), Err(WorktreeError::PathOccupied { .. })));
    assert!(plan.path.join("precious").exists());
    // A repository that someone else created is not ours either.
    let plan = repository.plan("s2");
    fs::create_dir_all(&plan.path).unwrap();
    git(&plan.path, &["init", "-q"]);
    assert!(matches!(repository.create(&plan), Err(WorktreeError::PathOccupied { .. })));
    // A branch that is checked out elsewhere.
    let plan = repository.plan("s3");
    repository.git(&["checkout", "-q", "-b", "qd/s3"]);
    assert!(matches!(repository.create(&plan), Err(WorktreeError::BranchInUse { .. })));
}

#[test]
fn hooks_of_the_repository_are_not_run() {
    let repository = TestRepository::new();
    let hooks = repository.repo().join(".git/hooks");
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
    let tree = repository.tree("s1");
    fs::write(tree.path.join("b.txt"), "b").unwrap();
    repository.merge(&tree, None, false).unwrap();
    tree.remove(false).unwrap();
    assert!(!repository.repo().join(".git/hooked").exists());
}

#[test]
fn a_worktree_with_work_is_not_removed() {
    let repository = TestRepository::new();
    let tree = repository.tree("s1");
    fs::write(tree.path.join("new.txt"), "x").unwrap();
    assert_eq!(state(&tree), WorktreeStatus::Dirty);
    let path = tree.path.clone();
    let error = tree.remove(false).unwrap_err();
    assert!(matches!(error, WorktreeError::Unmerged { state: WorktreeStatus::Dirty, .. }), "{error}");
    assert!(path.join("new.txt").exists());
    commit(&path, "new.txt", "x");
    let tree = repository.open(&path).unwrap();
    assert_eq!((state(&tree), tree.summarize().unwrap().ahead), (WorktreeStatus::Ahead, 1));
    assert!(matches!(tree.remove(false), Err(WorktreeError::Unmerged { state: WorktreeStatus::Ahead, .. })));
    assert!(path.exists());
    // With force the files are removed, and the commits stay.
    let tree = repository.open(&path).unwrap();
    assert_eq!(tree.remove(true).unwrap().as_deref(), Some("qd/s1"));
    assert!(!path.exists());
    assert_eq!(repository.git(&["show", "qd/s1:new.txt"]), "x");
}

#[test]
fn commits_without_a_branch_count_as_work() {
    let repository = TestRepository::new();
    let tree = repository.tree("s1");
    git(&tree.path, &["checkout", "-q", "--detach"]);
    commit(&tree.path, "b.txt", "b");
    assert_eq!(state(&tree), WorktreeStatus::Ahead);
    // A branch of another session does not make it safe, because that branch may be removed too.
    repository.git(&["branch", "qd/s2", &git(&tree.path, &["rev-parse", "HEAD"])]);
    assert_eq!(state(&tree), WorktreeStatus::Ahead);
    repository.git(&["branch", "kept", "qd/s2"]);
    assert_eq!(state(&tree), WorktreeStatus::Merged);
}

#[test]
fn a_merge_commits_what_was_not_and_moves_the_checkout_along() {
    let repository = TestRepository::new();
    let tree = repository.tree("s1");
    fs::write(tree.path.join("new.txt"), "work\n").unwrap();
    fs::write(tree.path.join("a.txt"), "one\n2\nthree\nfour\nfive\nsix\nseven\n").unwrap();
    repository.commit("main.txt", "meanwhile\n");
    fs::write(repository.repo().join("untracked"), "mine").unwrap();
    let outcome = repository.merge(&tree, None, false).unwrap();
    assert!(outcome.has_moved && outcome.committed.is_some());
    assert_eq!(outcome.checkout, Some(repository.repo()));
    assert_eq!(repository.git(&["rev-parse", "main"]), outcome.commit);
    assert_eq!(fs::read_to_string(repository.repo().join("new.txt")).unwrap(), "work\n");
    assert!(fs::read_to_string(repository.repo().join("a.txt")).unwrap().contains("\n2\n"));
    assert!(repository.repo().join("main.txt").exists());
    assert_eq!(repository.git(&["status", "--porcelain"]), "?? untracked");
    assert_eq!(state(&tree), WorktreeStatus::Merged);
    // A second merge has nothing to do.
    let again = repository.merge(&tree, None, false).unwrap();
    assert!(!again.has_moved && again.committed.is_none());
    let path = tree.path.clone();
    assert_eq!(tree.remove(false).unwrap(), None);
    assert!(!path.exists() && repository.git(&["branch", "--list", "qd/*"]).is_empty());
}

/// Git compares times in seconds and sizes in bytes. It must be made to read a file whose change alters neither.
#[test]
fn a_change_of_the_same_size_in_the_same_second_is_merged_too() {
    let repository = TestRepository::new();
    repository.commit("a", "one\n");
    let tree = repository.tree("s1");
    fs::write(tree.path.join("a"), "two\n").unwrap();
    // Wait for the next second, or the test proves nothing.
    std::thread::sleep(std::time::Duration::from_millis(1100));
    assert!(repository.merge(&tree, None, false).unwrap().has_moved);
    assert_eq!(fs::read_to_string(repository.repo().join("a")).unwrap(), "two\n");
    assert_eq!(state(&tree), WorktreeStatus::Merged);
}

#[test]
fn a_squash_is_one_commit_and_counts_as_merged() {
    let repository = TestRepository::new();
    let tree = repository.tree("s1");
    commit(&tree.path, "b.txt", "b");
    commit(&tree.path, "c.txt", "c");
    let before: u32 = repository.git(&["rev-list", "--count", "main"]).parse().unwrap();
    repository.merge(&tree, None, true).unwrap();
    let after: u32 = repository.git(&["rev-list", "--count", "main"]).parse().unwrap();
    assert_eq!(after, before + 1);
    assert_eq!(state(&tree), WorktreeStatus::Merged);
    tree.remove(false).unwrap();
}

#[test]
fn a_conflict_shows_its_places_and_changes_nothing() {
    let repository = TestRepository::new();
    let tree = repository.tree("s1");
    fs::write(tree.path.join("a.txt"), "one\nMINE\nthree\nfour\nfive\nsix\nseven\n").unwrap();
    fs::write(tree.path.join("new.txt"), "new").unwrap();
    git(&tree.path, &["add", "a.txt"]);
    repository.commit("a.txt", "one\nYOURS\nthree\nfour\nfive\nsix\nseven\n");
    let before = (repository.git(&["for-each-ref"]), git(&tree.path, &["status", "--porcelain"]));
    let error = repository.merge(&tree, None, false).unwrap_err();
    let WorktreeError::Conflicts { conflicts, .. } = &error else { panic!("{error}") };
    assert_eq!((conflicts.len(), conflicts[0].path.as_str()), (1, "a.txt"));
    assert!(conflicts[0].hunks.contains("MINE") && conflicts[0].hunks.contains("YOURS"), "{conflicts:?}");
    let after = (repository.git(&["for-each-ref"]), git(&tree.path, &["status", "--porcelain"]));
    assert_eq!(before, after);
    assert_eq!(repository.git(&["status", "--porcelain"]), "");
}

#[test]
fn a_checkout_with_changes_is_not_touched() {
    let repository = TestRepository::new();
    let tree = repository.tree("s1");
    commit(&tree.path, "b.txt", "b");
    fs::write(repository.repo().join("a.txt"), "mine").unwrap();
    let error = repository.merge(&tree, None, false).unwrap_err();
    assert!(matches!(error, WorktreeError::CheckoutDirty { .. }), "{error}");
    assert_eq!(fs::read_to_string(repository.repo().join("a.txt")).unwrap(), "mine");
    // Another branch can still be merged into, because it is not checked out.
    repository.git(&["branch", "release"]);
    let outcome = repository.merge(&tree, Some("release"), false).unwrap();
    assert_eq!(outcome.checkout, None);
    assert_eq!(repository.git(&["rev-parse", "release"]), outcome.commit);
    assert_eq!(repository.git(&["status", "--porcelain"]), " M a.txt");
}

#[test]
fn a_file_in_the_way_of_the_checkout_is_kept() {
    let repository = TestRepository::new();
    let tree = repository.tree("s1");
    commit(&tree.path, "b.txt", "theirs");
    fs::write(repository.repo().join("b.txt"), "mine").unwrap();
    let before = repository.git(&["rev-parse", "main"]);
    assert!(matches!(repository.merge(&tree, None, false), Err(WorktreeError::BranchMoved { .. })));
    assert_eq!(fs::read_to_string(repository.repo().join("b.txt")).unwrap(), "mine");
    assert_eq!(repository.git(&["rev-parse", "main"]), before);
}

#[test]
fn what_a_merge_cannot_do_well_is_refused() {
    let repository = TestRepository::new();
    let tree = repository.tree("s1");
    assert!(matches!(repository.merge(&tree, Some("nosuch"), false), Err(WorktreeError::NoBranch { .. })));
    assert!(matches!(repository.merge(&tree, Some("-x"), false), Err(WorktreeError::NoBranch { .. })));
    // An embedded repository: a commit would not include its files.
    let inner = tree.path.join("vendor/inner");
    fs::create_dir_all(&inner).unwrap();
    git(&inner, &["init", "-q"]);
    git(&inner, &["-c", "user.name=x", "-c", "user.email=x@x", "commit", "-q", "--allow-empty", "-m", "x"]);
    let error = repository.merge(&tree, None, false).unwrap_err();
    assert!(matches!(&error, WorktreeError::EmbeddedRepository(name) if name == "vendor/inner/"), "{error}");
    fs::remove_dir_all(tree.path.join("vendor")).unwrap();
    // An unfinished merge.
    commit(&tree.path, "a.txt", "mine");
    repository.commit("a.txt", "yours");
    let merge = Command::new("git").arg("-C").arg(&tree.path).args(["merge", "-q", "main"]).output().unwrap();
    assert!(!merge.status.success());
    assert!(matches!(repository.merge(&tree, None, false), Err(WorktreeError::Unfinished { .. })));
}

#[test]
fn a_diff_has_everything_that_is_committed_or_not() {
    let repository = TestRepository::new();
    let tree = repository.tree("s1");
    commit(&tree.path, "b.txt", "b\n");
    fs::write(tree.path.join("new file.txt"), "n\n").unwrap();
    fs::remove_file(tree.path.join("a.txt")).unwrap();
    repository.commit("main.txt", "is not the session's\n");
    let status = git(&tree.path, &["status", "--porcelain"]);
    let diff = tree.diff(true).unwrap();
    let names: Vec<_> = diff.files.iter().map(|file| file.path.as_str()).collect();
    assert_eq!(names, ["a.txt", "b.txt", "new file.txt"]);
    assert_eq!((diff.files[0].removed, diff.files[2].added), (Some(7), Some(1)));
    let patch = diff.patch.unwrap();
    assert!(patch.contains("+++ b/new file.txt") && patch.contains("+b"), "{patch}");
    assert!(diff.uncommitted && !diff.truncated);
    assert_eq!(git(&tree.path, &["status", "--porcelain"]), status, "the index is unchanged");
    assert!(tree.diff(false).unwrap().patch.is_none());
}

#[test]
fn two_worktrees_that_changed_the_same_lines_are_found() {
    let repository = TestRepository::new();
    let (first, second, third) = (repository.tree("s1"), repository.tree("s2"), repository.tree("s3"));
    fs::write(first.path.join("a.txt"), "one\n2\nthree\nfour\nfive\nsix\nseven\n").unwrap();
    commit(&second.path, "a.txt", "one\nzwei\ndrei\nfour\nfive\nsix\nseven\n");
    fs::write(third.path.join("a.txt"), "one\ntwo\nthree\nfour\nfive\nsix\n7\n").unwrap();
    fs::write(first.path.join("new.txt"), "x\n").unwrap();
    fs::write(third.path.join("new.txt"), "y\n").unwrap();
    let found = overlap::find_overlaps(&[first, second, third]).unwrap();
    assert_eq!(found.len(), 2, "{found:?}");
    assert_eq!((found[0].0, found[0].1, found[0].2[0].path.as_str()), (0, 1, "a.txt"));
    assert_eq!((found[0].2[0].lines[0].first, found[0].2[0].lines[0].last), (2, 2));
    assert_eq!((found[1].0, found[1].1, found[1].2[0].path.as_str()), (0, 2, "new.txt"));
}

#[test]
fn what_the_target_changed_between_two_starts_is_the_work_of_neither() {
    let repository = TestRepository::new();
    let earlier = repository.tree("s1");
    fs::write(earlier.path.join("a.txt"), "one\n2\nthree\nfour\nfive\nsix\nseven\n").unwrap();
    repository.commit("a.txt", "one\nzwei\nthree\nfour\nfive\nsix\nseven\n");
    let later = repository.tree("s2");
    fs::write(later.path.join("b.txt"), "b\n").unwrap();
    let trees = [earlier, later];
    assert_eq!(overlap::find_overlaps(&trees).unwrap(), []);
    fs::write(trees[1].path.join("a.txt"), "one\nii\nthree\nfour\nfive\nsix\nseven\n").unwrap();
    assert_eq!(overlap::find_overlaps(&trees).unwrap().len(), 1);
}

#[test]
fn ignored_files_are_copied_and_nothing_leads_out() {
    let repository = TestRepository::new();
    repository.commit(".gitignore", ".env\n*.local\nsecret\n");
    let outside = repository.path().join("outside");
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("x.local"), "outside").unwrap();
    let repo = repository.repo();
    fs::create_dir(repo.join("config")).unwrap();
    fs::write(repo.join("config/a.local"), "a").unwrap();
    fs::write(repo.join("config/plain.txt"), "not ignored").unwrap();
    fs::write(repo.join(".env"), "KEY=1").unwrap();
    std::os::unix::fs::symlink(&outside, repo.join("linked")).unwrap();
    std::os::unix::fs::symlink(outside.join("x.local"), repo.join("link.local")).unwrap();
    let tree = repository.tree("s1");
    let patterns: Vec<String> =
        [".env", "config/*", "linked/*", "*.local", "nosuch"].iter().map(|p| (*p).to_owned()).collect();
    let stop = StopFlag::default();
    let checkout = repository.find(&repo).unwrap();
    let copied = ignored_files::copy_ignored_files(&patterns, &checkout, &tree.path, &stop).unwrap();
    assert_eq!(copied.files, [".env", "config/a.local"]);
    assert!(copied.skipped.len() == 1 && copied.skipped[0].starts_with("config/plain.txt"), "{copied:?}");
    assert_eq!(fs::read_to_string(tree.path.join("config/a.local")).unwrap(), "a");
    assert!(!tree.path.join("linked").exists() && !tree.path.join("link.local").exists());
    assert_eq!(state(&tree), WorktreeStatus::Clean);
    // A second copy keeps files that already exist.
    fs::write(tree.path.join(".env"), "KEY=mine").unwrap();
    ignored_files::copy_ignored_files(&patterns, &checkout, &tree.path, &stop).unwrap();
    assert_eq!(fs::read_to_string(tree.path.join(".env")).unwrap(), "KEY=mine");
    // A symlink in the worktree does not lead out of it.
    let other = repository.tree("s2");
    std::os::unix::fs::symlink(&outside, other.path.join("config")).unwrap();
    let copied = ignored_files::copy_ignored_files(&patterns, &checkout, &other.path, &stop).unwrap();
    assert_eq!(copied.files, [".env"]);
    assert!(!outside.join("a.local").exists());
    let out = vec!["../outside/x.local".to_owned()];
    assert!(matches!(
        ignored_files::copy_ignored_files(&out, &checkout, &tree.path, &stop),
        Err(WorktreeError::BadPattern { .. })
    ));
}

#[test]
fn a_worktree_whose_repository_is_gone_is_removed_only_by_force() {
    let repository = TestRepository::new();
    let tree = repository.tree("s1");
    let path = tree.path;
    fs::remove_dir_all(repository.repo()).unwrap();
    assert!(matches!(repository.open(&path), Err(WorktreeError::NoWorktree(_))));
    assert!(matches!(
        remove::remove_unknown(&path, &repository.records(), false),
        Err(WorktreeError::Unmerged { .. })
    ));
    remove::remove_unknown(&path, &repository.records(), true).unwrap();
    assert!(!path.exists());
}

#[test]
fn a_worktree_with_submodules_can_be_made_and_removed() {
    let repository = TestRepository::new();
    let inner = TestRepository::new();
    let url = inner.repo().display().to_string();
    repository.git(&["-c", "protocol.file.allow=always", "submodule", "--quiet", "add", &url, "inner"]);
    repository.git(&["commit", "-q", "-m", "inner"]);
    let tree = repository.tree("s1");
    assert!(tree.has_submodules());
    assert_eq!(state(&tree), WorktreeStatus::Clean);
    let path = tree.path.clone();
    tree.remove(false).unwrap();
    assert!(!path.exists());
}

#[test]
fn a_changed_submodule_counts_as_work() {
    let repository = TestRepository::new();
    let inner = TestRepository::new();
    let url = inner.repo().display().to_string();
    let allowed = ["-c", "protocol.file.allow=always", "submodule", "--quiet"];
    repository.git(&[&allowed[..], &["add", &url, "inner"]].concat());
    repository.git(&["commit", "-q", "-m", "inner"]);
    let tree = repository.tree("s1");
    git(&tree.path, &[&allowed[..], &["update", "--init"]].concat());
    assert_eq!(state(&tree), WorktreeStatus::Clean);
    fs::write(tree.path.join("inner/a.txt"), "changed").unwrap();
    assert_eq!((state(&tree), tree.summarize().unwrap().changed_files), (WorktreeStatus::Dirty, 1));
    // A commit in the submodule is a change of the worktree, which a merge takes along.
    let identity = ["-c", "user.name=x", "-c", "user.email=x@x"];
    git(&tree.path.join("inner"), &[&identity[..], &["commit", "-q", "-a", "-m", "x"]].concat());
    let commit = git(&tree.path.join("inner"), &["rev-parse", "HEAD"]);
    assert!(tree.diff(true).unwrap().patch.unwrap().contains(&format!("+Subproject commit {commit}")));
    repository.merge(&tree, None, false).unwrap();
    assert_eq!(repository.git(&["rev-parse", "main:inner"]), commit);
}

#[test]
fn settings_that_run_nothing_still_count() {
    let repository = TestRepository::new();
    repository.git(&["config", "core.autocrlf", "input"]);
    repository.git(&["config", "user.name", "Ann \"A\" \\ O'Neil"]);
    let tree = repository.tree("s1");
    fs::write(tree.path.join("new.txt"), "one\r\ntwo\r\n").unwrap();
    repository.merge(&tree, None, false).unwrap();
    assert_eq!(repository.git(&["show", "main:new.txt"]), "one\ntwo");
    assert_eq!(repository.git(&["log", "-1", "--format=%an"]), "Ann \"A\" \\ O'Neil");
    // A change counts when the worktree is opened again, which the daemon does for each request.
    repository.git(&["config", "user.name", "Another"]);
    let tree = repository.open(&tree.path).unwrap();
    fs::write(tree.path.join("more.txt"), "x\n").unwrap();
    repository.merge(&tree, None, false).unwrap();
    assert_eq!(repository.git(&["log", "-1", "--format=%an"]), "Another");
}

#[test]
fn a_format_that_is_not_known_is_refused() {
    let repository = TestRepository::new();
    let tree = repository.tree("s1");
    repository.git(&["config", "extensions.future", "true"]);
    let error = repository.open(&tree.path).unwrap_err();
    assert!(matches!(error, WorktreeError::UnknownExtension { .. }), "{error}");
}

#[test]
fn a_sparse_checkout_gives_sparse_worktrees() {
    let repository = TestRepository::new();
    for dir in ["wanted", "unwanted"] {
        fs::create_dir(repository.repo().join(dir)).unwrap();
        repository.commit(&format!("{dir}/file.txt"), dir);
    }
    repository.git(&["sparse-checkout", "set", "wanted"]);
    let tree = repository.tree("s1");
    assert!(tree.path.join("wanted/file.txt").exists() && !tree.path.join("unwanted").exists());
    assert_eq!(state(&tree), WorktreeStatus::Clean);
    assert_eq!(git(&tree.path, &["status", "--porcelain"]), "", "the agent's own git agrees");
    fs::write(tree.path.join("wanted/new.txt"), "x\n").unwrap();
    repository.merge(&tree, None, false).unwrap();
    assert!(repository.repo().join("wanted/new.txt").exists());
    assert!(!repository.repo().join("unwanted").exists());
    assert_eq!(repository.git(&["show", "main:unwanted/file.txt"]), "unwanted");
}

#[test]
fn packed_refs_and_the_newer_format_of_refs_work() {
    let repository = TestRepository::new();
    let tree = repository.tree("s1");
    fs::write(tree.path.join("new.txt"), "x\n").unwrap();
    repository.merge(&tree, None, false).unwrap();
    repository.git(&["pack-refs", "--all"]);
    tree.remove(false).unwrap();
    assert_eq!(repository.git(&["branch", "--list", "qd/*"]), "");

    let newer = TestRepository { dir: tempfile::tempdir().unwrap() };
    let args = ["init", "-q", "-b", "main", "--ref-format=reftable"];
    let made = Command::new("git").args(args).arg(newer.repo()).output().unwrap();
    // Only git 2.45 and later have it.
    if made.status.success() {
        make_repository(&newer.repo());
        let tree = newer.tree("s1");
        fs::write(tree.path.join("new.txt"), "x\n").unwrap();
        assert_eq!(newer.merge(&tree, None, false).unwrap().checkout, Some(newer.repo()));
        assert_eq!(newer.git(&["show", "main:new.txt"]), "x");
        tree.remove(false).unwrap();
        assert_eq!(newer.git(&["branch", "--list", "qd/*"]), "");
    }
}
