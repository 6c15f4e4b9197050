//! Clients that prompt, steer and cancel, and change the order of queued runs.

use hyper::Method;
use serde_json::{Value, json};

use super::super::deck::empty;
use super::super::prompts;
use super::super::record::{StormSession, StormViolation};
use super::StormClient;

impl StormClient {
    fn random_prompt(&mut self, session: &StormSession, number: u64) -> String {
        if !session.is_script() {
            return prompts::echo_prompt(number, &mut self.random);
        }
        let features = self.deck.options.features;
        if features.session_limits && self.random.below(40) == 0 {
            let times = prompts::ASKS_OPEN_MAX + 1 + self.random.below(25);
            self.deck.record(|record| {
                record.count("ask floods");
                record.ask_floods.insert(prompts::run_id(number), times);
            });
            return prompts::ask_flood(number, times);
        }
        prompts::script_prompt(number, &mut self.random, &features, session.agent)
    }

    pub(super) async fn prompt(&mut self, session: &StormSession) {
        for _ in 0..=self.random.below(3) {
            let number = self.deck.number();
            let prompt = self.random_prompt(session, number);
            self.prompt_with(session, number, &prompt).await;
        }
    }

    /// Sends a prompt with a run id of its own until it is answered, sometimes twice at once.
    pub(super) async fn prompt_with(
        &mut self,
        session: &StormSession,
        number: u64,
        prompt: &str,
    ) -> Option<String> {
        let run = prompts::run_id(number);
        self.mark(session, number);
        let mut body = json!({ "session_id": session.id, "prompt": prompt, "run_id": run });
        if self.random.below(10) == 0 {
            let file =
                json!({ "name": "a.txt", "mime": "text/plain", "data": qd_testkit::base64(b"attached") });
            if session.is_script() {
                body["attachments"] = json!([file]);
            }
        }
        let path = session.workspace_path("/agent");
        let allowed = [202, 400, 404, 409];
        loop {
            let (one, two) = (self.any_client(), self.any_client());
            let deck = self.deck.clone();
            let first = deck.request(&one, Method::POST, &path, Some(&body), &allowed);
            let answers = if self.random.below(6) == 0 {
                let second = deck.request(&two, Method::POST, &path, Some(&body), &allowed);
                let (first, second) = tokio::join!(first, second);
                vec![first, second]
            } else {
                vec![first.await]
            };
            for (status, receipt) in answers.into_iter().flatten() {
                match status {
                    202 => {
                        if receipt["run_id"] != run.as_str() {
                            deck.violation(Some(&session.id), format!("{run} was answered with {receipt}"));
                        }
                        self.remember_run(session, &run, receipt);
                        return Some(run);
                    }
                    400 => {
                        // Attachments that this agent cannot take are refused; anything else is our mistake.
                        if receipt["error"]["code"] != "unsupported_setting" {
                            deck.violation(Some(&session.id), format!("a prompt was refused: {receipt}"));
                        }
                        return None;
                    }
                    404 | 409 => return None,
                    _ => {}
                }
            }
            if deck.is_ending() {
                return None;
            }
            self.pause().await;
        }
    }

    /// Remembers to whom a marker was sent.
    pub(super) fn mark(&self, session: &StormSession, number: u64) {
        self.deck.record(|record| record.markers.insert(number, session.id.clone()));
    }

    pub(super) fn mark_next(&self, session: &StormSession) -> u64 {
        let number = self.deck.number();
        self.mark(session, number);
        number
    }

    pub(super) fn remember_run(&self, session: &StormSession, run: &str, receipt: Value) {
        self.deck.record(|record| {
            let known = record.runs.insert(run.to_owned(), (session.id.clone(), receipt.clone()));
            if let Some((_, known)) = known
                && known["seq"] != receipt["seq"]
            {
                record.violations.push(StormViolation {
                    session: Some(session.id.clone()),
                    what: format!("{run} has two receipts: {known} and {receipt}"),
                });
            }
        });
    }

    pub(super) fn remember_cancelled(&self, session: &StormSession, runs: &Value) {
        self.deck.record(|record| {
            record.count("cancels");
            for run in runs.as_array().into_iter().flatten().filter_map(Value::as_str) {
                record.cancelled.insert(run.to_owned(), session.id.clone());
            }
        });
    }

    pub(super) async fn cancel(&mut self, session: &StormSession) {
        let sent = self.send(Method::POST, &session.agent_path("/cancel"), &empty(), &[200, 404]).await;
        if let Some((200, answer)) = sent {
            self.remember_cancelled(session, &answer["cancelled"]);
        }
    }

    /// One of the session's runs, which may have ended long ago.
    pub(super) fn some_run(&mut self, session: &StormSession) -> Option<String> {
        let runs: Vec<String> = self.deck.record(|record| {
            let own = record.runs.iter().filter(|(_, (owner, _))| *owner == session.id);
            own.map(|(run, _)| run.clone()).collect()
        });
        if runs.is_empty() { None } else { Some(self.random.pick(&runs).clone()) }
    }

    pub(super) async fn cancel_one(&mut self, session: &StormSession) {
        let Some(run) = self.some_run(session) else { return };
        let body = json!({ "run_id": run, "reason": "one" });
        let sent = self.send(Method::POST, &session.agent_path("/cancel"), &body, &[200, 404]).await;
        if let Some((200, answer)) = sent {
            self.remember_cancelled(session, &answer["cancelled"]);
        }
    }

    pub(super) async fn remove_from_queue(&mut self, session: &StormSession) {
        let path = match self.some_run(session) {
            Some(run) if self.random.below(3) > 0 => session.agent_path(&format!("/queue/{run}")),
            _ => session.agent_path("/queue"),
        };
        let client = self.any_client();
        let sent = self.deck.request(&client, Method::DELETE, &path, None, &[200, 404, 409]).await;
        if let Some((200, answer)) = sent {
            self.remember_cancelled(session, &answer["removed"]);
        }
    }

    /// Moves a queued run before another one, or to the end. Either may have started or ended meanwhile.
    pub(super) async fn move_in_queue(&mut self, session: &StormSession) {
        let Some((200, queue)) = self.get(&session.agent_path("/queue"), &[200, 404]).await else { return };
        let queued: Vec<&Value> = queue.as_array().into_iter().flatten().collect();
        if queued.is_empty() {
            return;
        }
        let run = self.random.pick(&queued)["run_id"].as_str().unwrap_or_default().to_owned();
        let before = match self.random.below(3) {
            0 => Value::Null,
            _ => self.random.pick(&queued)["run_id"].clone(),
        };
        let path = session.agent_path(&format!("/queue/{run}"));
        let sent = self.send(Method::PATCH, &path, &json!({ "before": before }), &[200, 404, 409]).await;
        if let Some((200, place)) = sent {
            if place["run_id"] != run.as_str() || place["position"].as_u64().is_none_or(|place| place == 0) {
                self.deck.violation(Some(&session.id), format!("a move of {run} was answered with {place}"));
            }
            self.deck.record(|record| record.count("moves"));
        }
    }

    pub(super) async fn steer(&mut self, session: &StormSession) {
        let number = self.mark_next(session);
        let body = json!({ "text": format!("steer {}", prompts::marker(number)) });
        let sent = self.send(Method::POST, &session.agent_path("/steer"), &body, &[202, 404, 409]).await;
        if let Some((202, receipt)) = sent {
            self.deck.record(|record| {
                record.count("steers");
                record.steers.push((session.id.clone(), receipt));
            });
        }
    }
}
