//! What a child of a keeper inherits, what is reported about it, and that nothing of it is left behind.

use std::collections::BTreeMap;
use std::path::Path;

use qd_keeper::{ChildExit, KeeperError, KeeperHandle, LaunchSpec, ProcessIdentity, Signal, procfs};
use tokio::io::AsyncWriteExt;

use crate::{PROGRAM, assert_nothing_below, command, new_mark, output, shell, start, until_ready};

/// The number of open descriptors of a process.
fn descriptors(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count()
}

#[tokio::test]
async fn a_child_has_the_folder_the_environment_and_the_arguments_it_was_given_and_no_more() {
    let mark = new_mark();
    let keeper = start(&mark).await;
    let directory = tempfile::tempdir().unwrap();
    let cwd = directory.path().canonicalize().unwrap();
    let launch = LaunchSpec {
        argv: ["sh", "-c", "pwd; echo \"$1\"; tr '\\0' '\\n' < /proc/$$/environ", "name", "an argument"]
            .map(str::to_owned)
            .to_vec(),
        env: BTreeMap::from([("KEY".to_owned(), "a \"value\"\tof two\nlines".to_owned())]),
        cwd: cwd.clone(),
        arg0: None,
    };
    let printed = output(keeper.spawn(launch).await.unwrap()).await;
    let expected =
        format!("{}\nan argument\nKEY=a \"value\"\tof two\nlines\nQD_MARK={mark}\n", cwd.display());
    assert_eq!(printed, expected);
}

#[tokio::test]
async fn a_child_inherits_no_descriptor_and_no_signal_that_is_blocked_or_ignored() {
    // A descriptor that a careless program left open without close-on-exec.
    let left_open = std::fs::File::open("/dev/null").unwrap();
    rustix::io::fcntl_setfd(&left_open, rustix::io::FdFlags::empty()).unwrap();
    let keeper = start(&new_mark()).await;
    let listed = output(keeper.spawn(command(&["ls", "/proc/self/fd"])).await.unwrap()).await;
    assert_eq!(listed, "0\n1\n2\n3\n", "3 is the directory that `ls` reads");

    let status = output(keeper.spawn(command(&["cat", "/proc/self/status"])).await.unwrap()).await;
    let signal_set = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        u64::from_str_radix(line.trim(), 16).unwrap()
    };
    // The two signals above the standard ones belong to the C library, which ignores them in everything it starts.
    let standard = (1 << 31) - 1;
    assert_eq!((signal_set("SigBlk:") & standard, signal_set("SigIgn:") & standard), (0, 0));
}

#[tokio::test]
async fn a_child_can_be_spoken_with_and_signalled_and_its_end_is_told() {
    let keeper = start(&new_mark()).await;
    let mut cat = keeper.spawn(command(&["cat"])).await.unwrap();
    assert_eq!(procfs::parent(cat.pid), Some(keeper.pid()));
    cat.stdin.write_all(b"hello\nready\n").await.unwrap();
    assert_eq!(until_ready(&mut cat).await, ["hello"]);
    assert!(procfs::send_signal(&ProcessIdentity::find(cat.pid).unwrap(), Signal::INT));
    assert_eq!(cat.exit.wait().await, ChildExit { status: None, signal: Some(2) });

    let exits_with_seven = keeper.spawn(shell("exit 7")).await.unwrap();
    assert_eq!(exits_with_seven.exit.wait().await, ChildExit { status: Some(7), signal: None });
}

#[tokio::test]
async fn processes_are_called_by_names_that_people_know() {
    let keeper = start(&new_mark()).await;
    let arguments = |pid: u32| std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap();
    keeper.begin_turn().await.unwrap();
    assert_eq!(procfs::name(keeper.pid()).as_deref(), Some("qd-keeper"));
    assert_eq!(arguments(keeper.pid()), "qd\0__keeper\0");
    let renamed = LaunchSpec { arg0: Some("an agent".to_owned()), ..command(&["sleep", "1000"]) };
    let child = keeper.spawn(renamed).await.unwrap();
    // The kernel sets the name a moment before the arguments.
    while procfs::name(child.pid).as_deref() != Some("sleep") || arguments(child.pid).is_empty() {
        keeper.begin_turn().await.unwrap();
    }
    assert_eq!(arguments(child.pid), "an agent\x001000\x00");
}

#[tokio::test]
async fn a_child_that_signals_its_own_group_does_not_hit_its_keeper() {
    let keeper = start(&new_mark()).await;
    let child = keeper.spawn(shell("kill -9 0")).await.unwrap();
    assert_eq!(child.exit.wait().await.signal, Some(9));
    keeper.begin_turn().await.unwrap();
}

#[tokio::test]
async fn what_cannot_be_started_says_why() {
    let keeper = start(&new_mark()).await;
    let missing = keeper.spawn(command(&["no-such-agent"])).await;
    assert!(matches!(missing, Err(KeeperError::NotFound(text)) if text == "no-such-agent was not found"));
    let missing = keeper.spawn(command(&["/no/such/agent"])).await;
    assert!(matches!(missing, Err(KeeperError::NotFound(_))));
    let elsewhere = keeper.spawn(LaunchSpec { cwd: "/no/such/folder".into(), ..command(&["true"]) }).await;
    assert!(matches!(elsewhere, Err(KeeperError::Refused(text)) if text.contains("/no/such/folder")));
    let no_program = keeper.spawn(command(&["/etc/passwd"])).await;
    assert!(matches!(no_program, Err(KeeperError::Refused(_))));
    assert!(matches!(keeper.spawn(command(&[])).await, Err(KeeperError::Refused(_))));
    let too_long = "x".repeat(4 << 20);
    assert!(matches!(keeper.spawn(command(&["true", &too_long])).await, Err(KeeperError::Refused(_))));
    assert_eq!(keeper.spawn(command(&["true"])).await.unwrap().exit.wait().await.status, Some(0));

    let not_started = KeeperHandle::start(Path::new("/no/such/program"), "").await;
    assert!(matches!(not_started, Err(KeeperError::NotStarted(_))));
}

#[tokio::test]
async fn a_child_that_nobody_waits_for_any_more_is_ended() {
    let mark = new_mark();
    let keeper = start(&mark).await;
    let mut given_up = Box::pin(keeper.spawn(command(&["sleep", "1000"])));
    // Polled once, so that the request is in the queue.
    tokio::select! {
        biased;
        _ = &mut given_up => panic!("the keeper has not replied yet"),
        () = std::future::ready(()) => {}
    }
    drop(given_up);
    // When this is answered, the child has been started and the command to kill it was sent before.
    keeper.begin_turn().await.unwrap();
    keeper.begin_turn().await.unwrap();
    while !procfs::children(keeper.pid()).is_empty() {
        keeper.begin_turn().await.unwrap();
    }
    assert_nothing_below(&keeper, &mark);
}

#[tokio::test]
async fn a_thousand_children_leave_no_zombie_and_no_descriptor() {
    let mark = new_mark();
    let keeper = start(&mark).await;
    let orphan = "(sleep 0 &)";
    output(keeper.spawn(shell(orphan)).await.unwrap()).await;
    let before = (descriptors(std::process::id()), descriptors(keeper.pid()));
    for _ in 0..500 {
        let (direct, with_orphan) =
            tokio::try_join!(keeper.spawn(command(&["true"])), keeper.spawn(shell(orphan))).unwrap();
        assert_eq!(direct.exit.wait().await.status, Some(0));
        // The output ends when the last process that holds it exits.
        output(with_orphan).await;
    }
    keeper.begin_turn().await.unwrap();
    let zombies = || procfs::children(keeper.pid());
    while !zombies().is_empty() {
        // The keeper learns of an orphan's death a moment after we see the end of its output.
        keeper.begin_turn().await.unwrap();
    }
    assert_eq!((descriptors(std::process::id()), descriptors(keeper.pid())), before);
    assert_nothing_below(&keeper, &mark);
}

#[tokio::test]
async fn a_keeper_is_not_ended_by_what_ends_a_terminal() {
    let keeper = start(&new_mark()).await;
    keeper.begin_turn().await.unwrap();
    let pid = rustix::process::Pid::from_raw(keeper.pid().try_into().unwrap()).unwrap();
    for signal in [Signal::HUP, Signal::INT, Signal::TERM, Signal::QUIT, Signal::PIPE] {
        rustix::process::kill_process(pid, signal).unwrap();
        keeper.begin_turn().await.unwrap();
    }
    assert_eq!(rustix::process::getsid(Some(pid)).unwrap(), pid, "the keeper has its own session");
    assert_eq!(procfs::mark_of(keeper.pid()), None);
    assert_eq!(std::fs::read(format!("/proc/{}/environ", keeper.pid())).unwrap(), b"");
}

#[tokio::test]
async fn a_long_command_reaches_a_keeper_that_is_busy() {
    let keeper = start(&new_mark()).await;
    let long = "x".repeat(100_000);
    let spawns = (0..8).map(|_| keeper.spawn(command(&["sh", "-c", "echo ${#1}", "sh", &long])));
    let mut running = tokio::task::JoinSet::new();
    for spawned in spawns {
        let child = spawned.await.unwrap();
        running.spawn(output(child));
    }
    assert_eq!(running.join_all().await, vec!["100000\n"; 8]);
    assert!(Path::new(PROGRAM).is_absolute());
}
