//! Every limit, by name. `docs/limits.md` lists them for users with what happens beyond each, and a test compares the
//! two. Names that end in `_S` are seconds; sizes are bytes unless the doc says otherwise.

/// Body of a request.
pub const BODY_MAX: usize = 8 << 20;
/// Request line and headers together.
pub const HEADERS_MAX: usize = 16 << 10;
/// Time for a client to send its headers, then again to send its body.
pub const REQUEST_READ_S: u64 = 30;
/// Connections at once of an agent without network to its model.
pub const MODEL_CONNECTIONS_MAX: usize = 64;
/// Open connections over all listeners. Fewer if the process may not open enough files.
pub const CONNECTIONS_MAX: usize = 4096;
/// Open TCP connections from one address. No more than three quarters of those that TCP may use, if that is fewer.
pub const ADDRESS_CONNECTIONS_MAX: usize = 1024;
/// Open TCP connections from one address that have not shown a valid token. No more than an eighth of those that TCP may
/// use, if that is fewer.
pub const ADDRESS_UNPROVEN_MAX: usize = 64;
/// Connections that event streams, waits and terminals may not use, so that commands always get one. With many
/// connections, one in 16 instead.
pub const COMMAND_CONNECTIONS: usize = 8;
/// Descriptors reserved for the daemon's own files: the journal, the search index, their logs, listeners, spools and
/// blobs.
pub const FILE_DESCRIPTORS: usize = 40;
/// Descriptors that the daemon holds for each worker: a socket, one that reports the end of the process, and the socket
/// of the session.
pub const WORKER_DESCRIPTORS: usize = 3;
/// MiB that the agent of one session may report in all, unless the session sets `max_journal_mb`.
pub const JOURNAL_MB_MAX: u64 = 4096;
/// Highest `max_journal_mb` that a session may set.
pub const JOURNAL_MB_SETTABLE_MAX: u64 = 1 << 20;
/// What each event of an agent counts for besides its text.
pub const SMALL_EVENT_BYTES: u64 = 256;
/// Queued runs in one session.
pub const QUEUE_MAX: usize = 100;
/// Open asks of one session.
pub const ASKS_OPEN_MAX: usize = 100;
/// Asks of one turn that an agent has made and that are open or wait until others are answered.
pub const ASKS_MADE_MAX: usize = 1000;
/// Commands that wait for the actor of one session or fleet.
pub const MAILBOX_MAX: usize = 4096;
/// Data of one event, as JSON.
pub const EVENT_MAX: usize = 1 << 20;
/// A text, as JSON, that is stored inside its event. A longer text is stored as a file. The rest of `EVENT_MAX` is for
/// the event's other fields.
pub const INLINE_MAX: usize = EVENT_MAX - (64 << 10);
/// The command line or policy rule in the `actor` of an event.
pub const ACTOR_TEXT_MAX: usize = 256;
/// How much of a text that is stored as a file its event still carries.
pub const HEAD_MAX: usize = 4 << 10;
/// One piece of streamed text. Adjacent pieces are merged up to this size; longer ones are split.
pub const DELTA_MAX: usize = 64 << 10;
/// Updates from an agent that its session has not taken yet.
pub const LINK_WINDOW: usize = 256;
/// Tokens, of input or of output, that one usage report may claim. No agent uses as many in a year.
pub const USAGE_TOKENS_MAX: u64 = 1_000_000_000_000;
/// US dollars that one usage report may claim.
pub const USAGE_COST_MAX_USD: u32 = 1_000_000;
/// Disk space held back so that cancels and run ends can still be written when the disk is full.
pub const RESERVE_BYTES: u64 = 16 << 20;
/// Items of a list in one response. `limit` can ask for fewer.
pub const PAGE_MAX: usize = 1000;
/// A title, or the name of a model, workspace or worker token.
pub const TITLE_MAX: usize = 200;
/// Characters of a first prompt that stand for the title of a session without one.
pub const AUTO_TITLE_CHARS_MAX: usize = 80;
/// Conversations of one agent that `qd adopt` reads, the newest first.
pub const CONVERSATIONS_MAX: usize = 1000;
/// Rules in one policy.
pub const RULES_MAX: usize = 1000;
/// Variables in a session's `env`.
pub const ENV_MAX: usize = 256;
/// Bytes of one value in a session's `env`.
pub const ENV_VALUE_MAX: usize = 64 << 10;
/// Files attached to one prompt.
pub const ATTACHMENTS_MAX: usize = 32;
/// Levels of parent sessions above a session.
pub const DEPTH_MAX: usize = 16;
/// Open sessions directly below one session. Applies to sessions that an agent creates, so an agent in a loop cannot
/// fill the machine.
pub const CHILDREN_MAX: usize = 64;
/// Open sessions in one tree, root included. Applies to sessions that an agent creates, so an agent cannot exceed
/// [`CHILDREN_MAX`] by nesting.
pub const TREE_SESSIONS_MAX: usize = 256;
/// Sessions named in one call of the tool `wait`.
pub const WAITED_FOR_MAX: usize = 100;
/// How much of a session's last answer a tool returns. The full text is in the run.
pub const TOOL_TEXT_MAX: usize = 32 << 10;
/// Default waiting time of a tool. It is below one minute, after which many MCP clients give up a call.
pub const TOOL_WAIT_S: u64 = 45;
/// How long one HTTP request of a waiting tool lasts before the tool sends the next.
pub const TOOL_POLL_S: u64 = 20;
/// How long `qd mcp` tries to reach a daemon that is gone before the call fails.
pub const TOOL_AWAY_S: u64 = 600;
/// Ids in one request for short ids.
pub const SHORT_IDS_MAX: usize = 100;
/// Shortest short id, in characters.
pub const SHORT_ID_MIN: usize = 4;
/// Sessions in one fleet.
pub const FLEET_SESSIONS_MAX: usize = 1000;
/// Routes in one fleet.
pub const FLEET_ROUTES_MAX: usize = 1000;
/// Entries in one block of subtasks.
pub const SUBTASKS_MAX: usize = 256;
/// How much of one session's last message a fleet passes to another session. The full text is in the run.
pub const FLEET_PASSED_MAX: usize = 256 << 10;
/// How much of one session's last message `collect: human` shows to a person.
pub const FLEET_SHOWN_MAX: usize = 16 << 10;
/// How much of the last message is kept as the fleet's result.
pub const FLEET_RESULT_MAX: usize = 64 << 10;
/// Messages that one fleet sends because a session mentioned another. It ends loops of mentions.
pub const FLEET_MENTIONS_MAX: u32 = 100;
/// Text of one mail message, as JSON. The whole text is in its event; longer content belongs in a file.
pub const MAIL_TEXT_MAX: usize = 256 << 10;
/// One file in a mail folder: enough for the longest text with its JSON escapes and the other fields.
pub const MAIL_FILE_MAX: u64 = 1 << 20;
/// Undelivered messages per mailbox: waiting, being delivered or claimed.
pub const MAIL_OPEN_MAX: usize = 1000;
/// Messages in one claim.
pub const MAIL_CLAIM_MAX: usize = 100;
/// Default duration of a claim.
pub const MAIL_CLAIM_S: u64 = 60;
/// Longest duration of a claim.
pub const MAIL_CLAIM_MAX_S: u64 = 3600;
/// How many times a message may return to the mailbox before it is quarantined.
pub const MAIL_RETURNS_MAX: u32 = 5;
/// Interval at which the daemon checks the mail folders.
pub const MAIL_LOOK_S: u64 = 1;
/// Time for an agent to become ready.
pub const START_S: u64 = 60;
/// Time for an agent to stop after a cancel before it is killed, unless the session sets `cancel_grace_s`.
pub const CANCEL_GRACE_S: u64 = 5;
/// Time for killed processes to disappear before they are reported as survivors.
pub const KILL_S: u64 = 30;
/// Silence of an agent in a turn before a notice says so, unless `silence_notice_s` is set. The next notices come each
/// time that the silence has doubled.
pub const SILENCE_NOTICE_S: u64 = 30;
/// How far ahead the reset of a quota may be. An agent that names a later time is not believed, and nothing waits for it.
pub const QUOTA_WAIT_MAX_S: u64 = 8 * 24 * 3600;
/// Processes of one agent's tree, unless `max_processes` is set.
pub const AGENT_PROCESSES_MAX: u64 = 4096;
/// Memory of one agent's tree in percent of the machine's, unless `max_memory_mb` is set.
pub const AGENT_MEMORY_PERCENT: u64 = 80;
/// MiB of text and tool calls that one agent may report in a minute, unless `max_output_mb_per_min` is set.
pub const AGENT_OUTPUT_MB_PER_MIN: u64 = 64;
/// How many times a crashed agent is restarted within [`RESTART_WINDOW_S`], unless the session sets `restarts`.
pub const RESTARTS: u32 = 10;
/// How long a crash counts, unless the session sets `restart_window_s`.
pub const RESTART_WINDOW_S: u64 = 60;
/// Highest `restarts` that a session may set.
pub const RESTARTS_MAX: u32 = 1000;
/// Size of the updates in a worker's spool that the daemon has not journalled yet. When the spool is full, the agent
/// waits.
pub const SPOOL_MAX: u64 = 64 << 20;
/// Silence on a worker's connection before a ping is sent. After three times as long, the connection counts as broken.
pub const PING_S: u64 = 5;
/// How long a worker keeps an agent that is in a turn while there is no daemon.
pub const ORPHAN_BUSY_S: u64 = 24 * 3600;
/// How long a worker keeps an agent that is not in a turn while there is no daemon.
pub const ORPHAN_IDLE_S: u64 = 600;
/// How long a daemon tries to reach a worker that lives but does not answer, unless `reach_timeout_s` is set. Then the
/// worker is ended, and its run is interrupted.
pub const REACH_TIMEOUT_S: u64 = 60;
/// How long a worker's record is valid without renewal.
pub const LEASE_S: u64 = 60;
/// How long a daemon waits for a joined worker that has gone silent. Then the worker's sessions count as lost.
pub const REMOTE_LEASE_S: u64 = 120;
/// Longest `timeout_s` of one request that waits for the end of a run.
pub const WAIT_MAX_S: u64 = 3600;
/// Silence on an event stream before a comment is sent.
pub const HEARTBEAT_S: u64 = 15;
/// Time for a shutdown after SIGTERM.
pub const STOP_S: u64 = 5;
/// How long a command of `qd` waits for a daemon that gives no sign of life.
pub const NO_ANSWER_S: u64 = 10;
/// How long an `Idempotency-Key` is remembered.
pub const IDEMPOTENCY_S: u64 = 24 * 3600;
/// Characters of an `Idempotency-Key`.
pub const IDEMPOTENCY_KEY_MAX: usize = 255;
/// Time from the start of the daemon to its first check of the journal for damage.
pub const JOURNAL_CHECK_DELAY_S: u64 = 600;
/// Time between two checks of the journal for damage.
pub const JOURNAL_CHECK_INTERVAL_S: u64 = 24 * 3600;
/// Time from the start of the daemon until it first merges old streamed text.
pub const MERGE_DELAY_S: u64 = 900;
/// Time between two such passes.
pub const MERGE_INTERVAL_S: u64 = 3600;
/// Words of one search, as text.
pub const SEARCH_QUERY_MAX: usize = 1000;
/// How much of one text can be found: a prompt, an answer, or the input of a tool call.
pub const SEARCH_TEXT_MAX: usize = 256 << 10;
/// Hits in one response, unless `limit` asks for fewer or more.
pub const SEARCH_HITS: usize = 50;
/// How long a search or a usage report waits until the index has everything that is in the journal.
pub const INDEX_WAIT_S: u64 = 5;
/// Free disk space below which the index does not grow, so that it never uses up what [`RESERVE_BYTES`] is for.
pub const INDEX_FREE_BYTES: u64 = 2 * RESERVE_BYTES;
/// One git command. A checkout of a large repository on a slow disk takes minutes; anything longer is a hang.
pub const GIT_S: u64 = 300;
/// One line of a project's `setup` or `teardown`. A cold install of dependencies must fit.
pub const HOOK_S: u64 = 900;
/// Lines in `setup`, lines in `teardown`, and patterns in `bring`, each.
pub const HOOKS_MAX: usize = 64;
/// How much of a hook's output is kept: its end, where the reason for a failure is.
pub const HOOK_OUTPUT_MAX: usize = 16 << 10;
/// Files that `bring` copies into a worktree. It is meant for settings, not for whole dependency trees.
pub const BRING_FILES_MAX: usize = 10000;
/// MiB of all files that `bring` copies together.
pub const BRING_MIB_MAX: usize = 512;
/// A patch in one response.
pub const PATCH_MAX: usize = 4 << 20;
/// Conflicting hunks in one response.
pub const CONFLICT_MAX: usize = 256 << 10;
/// Worktrees of one repository that are compared with each other. Each pair takes two git commands.
pub const OVERLAP_WORKTREES_MAX: usize = 32;
/// Files counted for the size of one worktree.
pub const WORKTREE_FILES_MAX: usize = 500000;
