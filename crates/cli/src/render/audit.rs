//! The entries of `qd audit`, one line each: when, who, what, and to what.

use qd_protocol::Millis;
use qd_protocol::audit::AuditEntry;
use qd_protocol::event::EventActor;

use super::table::TextTable;
use super::text::format_age;

/// A table of entries. `--json` has the ids and command lines in full.
pub(crate) fn render_audit(entries: &[AuditEntry], now: Millis) -> TextTable {
    let mut table = TextTable::new(&["AGE", "WHO", "DID", "WHERE", "WHAT"]);
    // Commands take the ids.
    table.set_min_width(3, usize::MAX);
    for entry in entries {
        let place = entry.session_id.as_ref().map(ToString::to_string).or_else(|| entry.object.clone());
        table.add_row([
            format_age(entry.at, now),
            describe_actor(&entry.actor),
            entry.action.as_str().replace('_', " "),
            place.unwrap_or_default(),
            entry
                .detail
                .clone()
                .or_else(|| entry.run_id.as_ref().map(ToString::to_string))
                .unwrap_or_default(),
        ]);
    }
    table
}

/// Who did it, in a few words.
fn describe_actor(actor: &EventActor) -> String {
    match actor {
        EventActor::User { command: Some(command), .. } => format!("user: {}", short_command(command)),
        EventActor::User { pid: Some(pid), .. } => format!("user: process {pid}"),
        EventActor::User { uid, .. } => format!("user {uid}"),
        EventActor::Token { name, address, .. } => format!("token {name} from {address}"),
        EventActor::Agent { session_id } => format!("agent of {session_id}"),
        EventActor::Policy { rule: Some(rule) } => format!("policy: {rule}"),
        EventActor::Policy { rule: None } => "policy".to_owned(),
        EventActor::Fleet { fleet_id } => format!("fleet {fleet_id}"),
        EventActor::Daemon { session_id: Some(session) } => format!("daemon for {session}"),
        EventActor::Daemon { session_id: None } => "daemon".to_owned(),
    }
}

/// A command line without the directory of its program.
fn short_command(command: &str) -> String {
    let (program, arguments) = command.split_once(' ').unwrap_or((command, ""));
    let name = program.rsplit('/').next().unwrap_or(program);
    format!("{name} {arguments}").trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use qd_protocol::api::TokenRole;
    use qd_protocol::audit::AuditAction;
    use qd_protocol::{RunId, Seq, SessionId};

    use super::*;
    use crate::render::view_snapshot::assert_view;

    fn entry(seq: u64, actor: EventActor, action: AuditAction, detail: Option<&str>) -> AuditEntry {
        AuditEntry {
            seq: Seq(seq),
            at: Millis(seq * 60_000),
            actor,
            action,
            kind: String::new(),
            workspace_id: None,
            session_id: Some(SessionId::parse("ses_ar477mby3tane7hf").unwrap()),
            run_id: Some(RunId::parse("run_5k1xq2m8fz0p7t3c").unwrap()),
            object: None,
            detail: detail.map(str::to_owned),
        }
    }

    #[test]
    fn audit_reads_well() {
        let session_id = SessionId::parse("ses_ar477mby3tane7hf").unwrap();
        let user = EventActor::User {
            uid: 1000,
            pid: Some(4711),
            command: Some("/usr/local/bin/qd run --agent claude fix the parser".to_owned()),
        };
        let token = EventActor::Token {
            name: "phone".to_owned(),
            role: TokenRole::Approver,
            address: "10.0.0.7:51514".to_owned(),
        };
        let policy = EventActor::Policy { rule: Some("allow Bash git status*".to_owned()) };
        let halt = AuditEntry {
            session_id: None,
            run_id: None,
            ..entry(50, EventActor::User { uid: 1000, pid: None, command: None }, AuditAction::Halt, None)
        };
        let entries = [
            halt,
            entry(40, EventActor::Daemon { session_id: None }, AuditAction::Cancel, None),
            entry(30, EventActor::Agent { session_id }, AuditAction::CreateSession, Some("codex")),
            entry(20, token, AuditAction::Answer, Some("allow_once Bash")),
            entry(19, policy, AuditAction::Answer, Some("allow_once Bash")),
            entry(10, user, AuditAction::Prompt, Some("fix the parser of dates, which takes 2026-02-30")),
        ];
        assert_view("audit", |style, width| render_audit(&entries, Millis(3_600_000)).render(style, width));
    }
}
