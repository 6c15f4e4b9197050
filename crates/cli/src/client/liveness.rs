//! Tells a slow answer from a daemon that does not live. While a request waits, a second connection asks for `/healthz`,
//! which a live daemon answers at once, whatever it does for the request. A daemon that answers neither is reported on
//! stderr and then given up.

use std::pin::pin;
use std::sync::atomic::Ordering;
use std::time::Duration;

use http_body_util::BodyExt;
use hyper::Method;
use qd_protocol::limits::{HEARTBEAT_S, NO_ANSWER_S};
use tokio::time::{sleep, timeout};

use super::DaemonClient;
use super::host::DaemonHost;
use crate::failure::{CliFailure, Result};

/// How long an answer may take before the first probe.
pub(super) const REQUEST_PROBE_AFTER: Duration = Duration::from_millis(500);
/// How long a stream may be silent before the first probe.
pub(super) const STREAM_PROBE_AFTER: Duration = Duration::from_secs(4);
/// The longest pause between two probes. It doubles from one to the next.
const MAX_PROBE_INTERVAL: Duration = Duration::from_secs(HEARTBEAT_S);
/// How long a probe may take before a note is printed: two seconds after the request.
const NOTE_AFTER: Duration = Duration::from_millis(1500);
/// How long a probe may take after the note, until [`NO_ANSWER_S`] after the request.
const GIVE_UP_AFTER_NOTE: Duration = Duration::from_secs(NO_ANSWER_S - 2);
/// Between two probes if the first one fails, because the daemon may be restarting.
const FAILED_PROBE_INTERVAL: Duration = Duration::from_millis(200);

impl DaemonClient {
    /// Waits for an answer as long as the daemon gives signs of life. `probe_after` is how long the answer usually takes.
    pub(super) async fn while_daemon_lives<T>(
        &self,
        probe_after: Duration,
        answer: impl Future<Output = T>,
    ) -> Result<T> {
        let mut answer = pin!(answer);
        let mut interval = probe_after;
        loop {
            if let Ok(answer) = timeout(interval, answer.as_mut()).await {
                return Ok(answer);
            }
            tokio::select! {
                biased;
                answer = answer.as_mut() => {
                    self.note_answering();
                    return Ok(answer);
                }
                // Boxed, because it is rarely needed and as large as a request.
                alive = Box::pin(self.wait_for_sign_of_life()) => alive?,
            }
            interval = (interval * 2).min(MAX_PROBE_INTERVAL);
        }
    }

    /// Returns once the daemon answers on another connection. Prints a note if that takes long.
    async fn wait_for_sign_of_life(&self) -> Result<()> {
        let mut probe = pin!(async {
            // A probe that fails decides nothing: if the daemon is gone, the request's own connection breaks too.
            while self.probe_on_new_connection().await.is_err() {
                sleep(FAILED_PROBE_INTERVAL).await;
            }
        });
        if timeout(NOTE_AFTER, probe.as_mut()).await.is_err() {
            self.note_silent();
            if timeout(GIVE_UP_AFTER_NOTE, probe).await.is_err() {
                return Err(CliFailure::Unresponsive(format!(
                    "{}; gave up after {NO_ANSWER_S} s",
                    self.describe_silence()
                )));
            }
        }
        self.note_answering();
        Ok(())
    }

    /// Whether anything that speaks HTTP answers. Even a refusal is a sign of life.
    async fn probe_on_new_connection(&self) -> Result<()> {
        let mut connection = self.connect().await?;
        let request = self.build_request(&Method::GET, "/healthz", None, None)?;
        let response = connection.send(request).await.map_err(|error| self.connection_failure(error))?;
        response.into_body().collect().await.map_err(|error| self.connection_failure(error))?;
        Ok(())
    }

    fn note_silent(&self) {
        if let Some(out) = &self.shared.notes
            && !self.shared.is_silence_noted.swap(true, Ordering::Relaxed)
        {
            let seconds = GIVE_UP_AFTER_NOTE.as_secs();
            out.print_note(&format!("{}; waiting {seconds} s more", self.describe_silence()));
        }
    }

    fn note_answering(&self) {
        if let Some(out) = &self.shared.notes
            && self.shared.is_silence_noted.swap(false, Ordering::Relaxed)
        {
            out.print_note("the daemon answers again");
        }
    }

    /// What is known about a daemon that does not answer, and what helps.
    fn describe_silence(&self) -> String {
        let pid = self.shared.daemon_pid.load(Ordering::Relaxed);
        match self.host() {
            DaemonHost::Unix(_) if pid > 0 => describe_silent_process(pid),
            host => format!("the daemon at {host} does not answer; `qd doctor` on its machine says more"),
        }
    }
}

/// What is known about a daemon of this machine that does not answer.
pub(crate) fn describe_silent_process(pid: u32) -> String {
    match is_process_stopped(pid) {
        true => format!(
            "the daemon (pid {pid}) does not answer because it is stopped; `kill -CONT {pid}` continues it"
        ),
        false => format!(
            "the daemon (pid {pid}) does not answer; if it never does, `kill {pid}` ends it, and `qd doctor` starts \
             and checks another"
        ),
    }
}

/// Whether a process was stopped by a signal or a debugger.
pub(crate) fn is_process_stopped(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name may contain spaces and brackets; the state comes after it.
    let state = stat.rsplit_once(')').and_then(|(_, rest)| rest.trim_start().chars().next());
    matches!(state, Some('T' | 't'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stopped_process_is_told_from_a_running_one() {
        use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
        assert!(!is_process_stopped(std::process::id()) && !is_process_stopped(u32::MAX));
        let mut child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        let pid = Pid::from_child(&child);
        kill_process(pid, Signal::STOP).unwrap();
        waitpid(Some(pid), WaitOptions::UNTRACED).unwrap();
        assert!(is_process_stopped(child.id()));
        assert!(describe_silent_process(child.id()).contains(&format!("`kill -CONT {}`", child.id())));
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
