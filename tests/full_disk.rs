//! A disk that is full for a while: nothing that an agent says is lost or doubled, no run is stuck, and cancels still
//! work. Each test mounts a small file system of its own as the daemon's home, so that journal, spools and logs share it.

use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use qd_testkit::{TestDaemon, TestHome, TestSession, journal_rules, poll_until, processes, script::*};
use serde_json::{Value, json};

use crate::workers_loss::process_of;

/// Set in the process that has mount points of its own.
const INSIDE: &str = "QD_TEST_SMALL_DISK";
/// Large enough for a journal with its reserve, and quick to fill.
const DISK_MIB: u64 = 48;
/// How long the disk stays full, once the first request was refused. Every agent speaks in this time.
const FULL_FOR: Duration = Duration::from_secs(3);
/// Sessions that talk at once.
const TALKERS: usize = 4;

/// A daemon whose home is a small file system.
struct SmallDisk {
    daemon: TestDaemon,
}

impl SmallDisk {
    async fn mount() -> Self {
        let home = TestHome::new();
        std::fs::create_dir(home.path()).unwrap();
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={DISK_MIB}m,mode=0700"), "none"])
            .arg(home.path())
            .status();
        assert!(mounted.unwrap().success());
        Self { daemon: TestDaemon::start_in(home, |_| {}).await }
    }

    fn ballast(&self) -> PathBuf {
        self.daemon.home.path().join("ballast")
    }

    /// Takes all space that is left, and waits until the daemon notices. The bystander gets new titles until one cannot be
    /// written. A prompt would not do: the end of its run frees the reserve, which would be taken too.
    async fn fill(&self, bystander: &TestSession) {
        let mut titles = 0;
        poll_until("the journal to be full", async || {
            // What was freed in the meantime is taken as well.
            self.take_space();
            titles += 1;
            (bystander.try_patch(json!({ "title": titles.to_string() })).await.status == 503).then_some(())
        })
        .await;
    }

    fn take_space(&self) {
        let mut ballast = File::options().append(true).create(true).open(self.ballast()).unwrap();
        for piece in [1 << 20, 1 << 12, 1] {
            while ballast.write_all(&vec![b'x'; piece]).is_ok() {}
        }
    }

    /// Waits while the agents run into the full disk. No more space is taken, because a cancel may free the reserve.
    async fn stay_full(&self) {
        tokio::time::sleep(FULL_FOR).await;
    }

    fn free(&self) {
        std::fs::remove_file(self.ballast()).unwrap();
    }

    /// Ends everything and unmounts the disk.
    async fn unmount(mut self) {
        self.daemon.kill9().await;
        self.daemon.home.kill_workers();
        self.daemon.home.wait_for_no_agents().await;
        let unmounted = Command::new("umount").arg("-l").arg(self.daemon.home.path()).status();
        assert!(unmounted.unwrap().success());
    }
}

/// Runs a test again in a process with mount points of its own. Returns whether this already is that process.
fn is_inside(test: &str) -> bool {
    if std::env::var_os(INSIDE).is_some() {
        return true;
    }
    // Without root, `unshare -r` makes us root in a user namespace.
    let flags = if rustix::process::geteuid().is_root() { "-m" } else { "-rm" };
    let output = Command::new("unshare")
        .arg(flags)
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", &format!("full_disk::{test}"), "--nocapture"])
        .env(INSIDE, "1")
        .output()
        .unwrap();
    let text =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
    false
}

/// What each talker says: enough to go on for longer than the disk is full.
fn talk() -> Vec<Value> {
    count(600, 10)
}

async fn start_talkers(disk: &SmallDisk) -> Vec<(TestSession, String)> {
    let mut talkers = Vec::new();
    for _ in 0..TALKERS {
        let session = disk.daemon.session("script").await;
        let run = session.prompt_script(&talk()).await;
        session.wait_for_run_event(&run, "text.delta").await;
        talkers.push((session, run));
    }
    talkers
}

/// A disk that is full and has been for a while, and the runs that talk meanwhile.
async fn fill_disk_under_talkers() -> (SmallDisk, Vec<(TestSession, String)>) {
    let disk = SmallDisk::mount().await;
    let bystander = disk.daemon.session("echo").await;
    let talkers = start_talkers(&disk).await;
    disk.fill(&bystander).await;
    disk.stay_full().await;
    (disk, talkers)
}

async fn expect_whole_text(session: &TestSession, run: &str) {
    let ended = session.wait(run).await;
    assert_eq!(ended["finish_reason"], "end_turn", "{ended}");
    assert_eq!(ended["text"], counted_text(600), "everything is there, once and in order");
    let events = session.events().await;
    journal_rules::check(&events);
    let deltas = events.iter().filter(|event| event.is_of_run(run, "text.delta"));
    let text: String = deltas.map(|event| event.data["text"].as_str().unwrap()).collect();
    assert_eq!(text, counted_text(600));
}

#[tokio::test]
async fn runs_that_meet_a_full_disk_go_on_when_there_is_space_and_lose_nothing() {
    if !is_inside("runs_that_meet_a_full_disk_go_on_when_there_is_space_and_lose_nothing") {
        return;
    }
    let (disk, talkers) = fill_disk_under_talkers().await;
    disk.free();
    for (session, run) in &talkers {
        expect_whole_text(session, run).await;
    }
    disk.unmount().await;
}

#[tokio::test]
async fn a_cancel_on_a_full_disk_stops_the_agent() {
    if !is_inside("a_cancel_on_a_full_disk_stops_the_agent") {
        return;
    }
    let (disk, talkers) = fill_disk_under_talkers().await;
    let (cancelled, others) = talkers.split_first().unwrap();
    let (session, run) = cancelled;
    session.cancel_run(run).await;
    disk.free();
    let ended = session.wait(run).await;
    assert_eq!(ended["finish_reason"], "cancelled", "{ended}");
    assert!(counted_text(600).starts_with(ended["text"].as_str().unwrap()), "{ended}");
    assert_ne!(ended["text"], counted_text(600), "it was stopped");
    journal_rules::check(&session.events().await);
    for (session, run) in others {
        expect_whole_text(session, run).await;
    }
    disk.unmount().await;
}

#[tokio::test]
async fn an_agent_that_ignores_its_cancel_is_killed_on_a_full_disk_too() {
    if !is_inside("an_agent_that_ignores_its_cancel_is_killed_on_a_full_disk_too") {
        return;
    }
    let disk = SmallDisk::mount().await;
    let bystander = disk.daemon.session("echo").await;
    let settings = json!({ "agent": "script", "cancel_grace_s": 0.5 });
    let session = disk.daemon.session_with(settings).await;
    let run = session.prompt_script(&[vec![ignore_cancel()], talk(), vec![sleep_forever()]].concat()).await;
    session.wait_for_run_event(&run, "text.delta").await;
    let worker = process_of(&session).await;
    disk.fill(&bystander).await;
    session.cancel_run(&run).await;
    poll_until("the agent to be killed", async || {
        let family = processes::descendants(worker.pid);
        (!family.iter().any(|process| process.has_role("__script"))).then_some(())
    })
    .await;
    disk.free();
    let ended = session.wait(&run).await;
    assert_eq!(ended["finish_reason"], "cancelled", "{ended}");
    journal_rules::check(&session.events().await);
    disk.unmount().await;
}

#[tokio::test]
async fn a_daemon_that_dies_on_a_full_disk_finds_all_that_was_said_meanwhile() {
    if !is_inside("a_daemon_that_dies_on_a_full_disk_finds_all_that_was_said_meanwhile") {
        return;
    }
    let mut disk = SmallDisk::mount().await;
    let bystander = disk.daemon.session("echo").await;
    let talkers = start_talkers(&disk).await;
    disk.fill(&bystander).await;
    disk.daemon.kill9().await;
    disk.stay_full().await;
    disk.free();
    disk.daemon.start_again().await;
    for (session, run) in &talkers {
        expect_whole_text(session, run).await;
    }
    disk.unmount().await;
}

#[tokio::test]
async fn a_file_size_limit_of_a_worker_is_a_full_disk_and_not_its_death() {
    use rustix::process::{Pid, Resource, Rlimit, prlimit};
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let run = session.prompt_script(&talk()).await;
    session.wait_for_run_event(&run, "text.delta").await;
    let worker = process_of(&session).await;
    let pid = Pid::from_raw(i32::try_from(worker.pid).unwrap());
    prlimit(pid, Resource::Fsize, Rlimit { current: Some(0), maximum: None }).unwrap();
    session
        .wait_for_event("words that were not spooled", |event| {
            event.is_of_run(&run, "text.delta") && event.data["text"].as_str().unwrap().contains("300 ")
        })
        .await;
    prlimit(pid, Resource::Fsize, Rlimit { current: None, maximum: None }).unwrap();
    expect_whole_text(&session, &run).await;
    assert!(worker.is_alive());
}
