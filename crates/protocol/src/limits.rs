//! Every limit, by name. `docs/limits.md` is this list for people, and a test compares the two.

/// A request's body.
pub const BODY_MAX: usize = 8 << 20;
/// A request's line and headers together.
pub const HEADERS_MAX: usize = 16 << 10;
/// How long a client may take to send its headers, and then its body.
pub const REQUEST_READ_S: u64 = 30;
/// Connections at once, over all listeners.
pub const CONNECTIONS_MAX: usize = 4096;
/// Runs that may wait in one session's queue.
pub const QUEUE_MAX: usize = 100;
/// Commands that may wait for one session's actor.
pub const MAILBOX_MAX: usize = 4096;
/// The data of one event, as JSON.
pub const EVENT_MAX: usize = 1 << 20;
/// A text, as JSON, that is kept inside its event; a longer one is kept as a file. The rest of `EVENT_MAX` is for
/// the event's other fields.
pub const INLINE_MAX: usize = EVENT_MAX - (64 << 10);
/// What an event carries of a text that is kept as a file.
pub const HEAD_MAX: usize = 4 << 10;
/// One piece of streamed text; neighbours are merged up to this, and longer ones are cut into several.
pub const DELTA_MAX: usize = 64 << 10;
/// Things an agent may have said that its session has not taken yet.
pub const LINK_WINDOW: usize = 256;
/// Free space held back so that cancels and ends still fit on a full disk.
pub const RESERVE_BYTES: u64 = 16 << 20;
/// Items of a list in one answer, unless `limit` says less.
pub const PAGE_MAX: usize = 1000;
/// A title.
pub const TITLE_MAX: usize = 200;
/// Rules in one policy.
pub const RULES_MAX: usize = 1000;
/// Variables in a session's `env`.
pub const ENV_MAX: usize = 256;
/// Bytes of one value in a session's `env`.
pub const ENV_VALUE_MAX: usize = 64 << 10;
/// Files with one prompt.
pub const ATTACHMENTS_MAX: usize = 32;
/// Sessions above a session.
pub const DEPTH_MAX: usize = 16;
/// Open sessions right below one session, where an agent makes them: one that loops must not fill the machine.
pub const CHILDREN_MAX: usize = 64;
/// Open sessions in one tree, its root included, where an agent makes them: no part of a tree gets more than the whole.
pub const TREE_SESSIONS_MAX: usize = 256;
/// Sessions that one call of the tool `wait` can name.
pub const WAITED_FOR_MAX: usize = 100;
/// What a tool tells of the last answer of one session; the whole of it is in its run.
pub const TOOL_TEXT_MAX: usize = 32 << 10;
/// How long a tool waits unless it is told: less than the minute after which many clients give a call up.
pub const TOOL_WAIT_S: u64 = 45;
/// How long one request of a tool's wait lasts before it is asked again.
pub const TOOL_POLL_S: u64 = 20;
/// How long `qd mcp` tries to reach a daemon that has gone before a call fails.
pub const TOOL_AWAY_S: u64 = 600;
/// Sessions in one fleet.
pub const FLEET_SESSIONS_MAX: usize = 1000;
/// Routes in one fleet.
pub const FLEET_ROUTES_MAX: usize = 1000;
/// Subtasks in one block.
pub const SUBTASKS_MAX: usize = 256;
/// What one session of a fleet is passed of the last message of another; the whole of it is in its run.
pub const FLEET_PASSED_MAX: usize = 256 << 10;
/// What a person is shown of the last message of one session of a fleet, when asked for the result.
pub const FLEET_SHOWN_MAX: usize = 16 << 10;
/// What is kept of the last message as the result of a fleet.
pub const FLEET_RESULT_MAX: usize = 64 << 10;
/// Messages that one fleet sends because a session mentioned another: a circle of mentions has to end.
pub const FLEET_MENTIONS_MAX: u32 = 100;
/// The text of one message between sessions, as JSON. It is in its event whole; what is longer belongs into a file.
pub const MAIL_TEXT_MAX: usize = 256 << 10;
/// A file in a mail folder: a message of the longest text and what JSON makes of it.
pub const MAIL_FILE_MAX: u64 = 1 << 20;
/// Messages in one mailbox that nothing has become of.
pub const MAIL_OPEN_MAX: usize = 1000;
/// Messages in one claim.
pub const MAIL_CLAIM_MAX: usize = 100;
/// How long a claim counts unless it says otherwise.
pub const MAIL_CLAIM_S: u64 = 60;
/// The longest that a claim may count.
pub const MAIL_CLAIM_MAX_S: u64 = 3600;
/// How often a message comes back before nobody gets it any more.
pub const MAIL_RETURNS_MAX: u32 = 5;
/// How often the mail folders are looked at.
pub const MAIL_LOOK_S: u64 = 1;
/// How long an agent may take to be ready.
pub const START_S: u64 = 60;
/// How long an agent may take to stop after it was asked, before it is killed, unless the session says otherwise.
pub const CANCEL_GRACE_S: u64 = 5;
/// How long the kernel may take to let a killed process go before it is named as a survivor.
pub const KILL_S: u64 = 30;
/// How often an agent that crashed is started again within [`RESTART_WINDOW_S`], unless the session says otherwise.
pub const RESTARTS: u32 = 10;
/// How long a crash counts, unless the session says otherwise.
pub const RESTART_WINDOW_S: u64 = 60;
/// The most that a session may ask for in `restarts`.
pub const RESTARTS_MAX: u32 = 1000;
/// Bytes of what a worker has said and the daemon has not journalled; at the bound the agent waits.
pub const SPOOL_MAX: u64 = 64 << 20;
/// Silence on a worker's connection before it is asked for a sign of life; after three times that it counts as broken.
pub const PING_S: u64 = 5;
/// How long a worker keeps an agent in mid-turn while no daemon comes.
pub const ORPHAN_BUSY_S: u64 = 24 * 3600;
/// How long a worker keeps an agent without a turn while no daemon comes.
pub const ORPHAN_IDLE_S: u64 = 600;
/// How long a worker's record counts without being renewed.
pub const LEASE_S: u64 = 60;
/// How long a daemon waits for a joined worker that has gone silent before its sessions count as lost.
pub const REMOTE_LEASE_S: u64 = 120;
/// The longest wait in one request for the end of a run.
pub const WAIT_MAX_S: u64 = 3600;
/// Silence on an event stream before a comment is sent.
pub const HEARTBEAT_S: u64 = 15;
/// How long SIGTERM may take to end everything.
pub const STOP_S: u64 = 5;
/// How long an `Idempotency-Key` is remembered.
pub const IDEMPOTENCY_S: u64 = 24 * 3600;
/// An `Idempotency-Key`.
pub const IDEMPOTENCY_KEY_MAX: usize = 255;
/// Seconds that one call of git may take. A checkout of a large repository on a slow disk needs minutes; more is a hang.
pub const GIT_S: u64 = 300;
/// Seconds that one line of a project's set-up or tear-down may take: what a cold install of dependencies needs.
pub const HOOK_S: u64 = 900;
/// Lines of set-up, of tear-down, and patterns of files to bring along, each.
pub const HOOKS_MAX: usize = 64;
/// Bytes of a hook's output that are kept: its end, where the reason stands.
pub const HOOK_OUTPUT_MAX: usize = 16 << 10;
/// Files that are brought along into a worktree: settings, and no whole dependencies.
pub const BRING_FILES_MAX: usize = 10000;
/// MiB that those files may have together.
pub const BRING_MIB_MAX: usize = 512;
/// Bytes of a patch in one answer.
pub const PATCH_MAX: usize = 4 << 20;
/// Bytes of conflicting hunks in one answer.
pub const CONFLICT_MAX: usize = 256 << 10;
/// Worktrees of one repository whose changes are compared with each other: it takes two calls of git for each pair.
pub const OVERLAP_WORKTREES_MAX: usize = 32;
/// Files that are counted for the size of one worktree.
pub const WORKTREE_FILES_MAX: usize = 500000;
