//! Clients that send mail to sessions, over HTTP and by their folders, and claim it.

use hyper::Method;
use serde_json::json;

use super::super::prompts;
use super::super::record::StormSession;
use super::StormClient;

impl StormClient {
    pub(super) async fn send_mail(&mut self, session: &StormSession) {
        let number = self.mark_next(session);
        let id = format!("m{number}");
        let deliver = *self.random.pick(&["prompt", "steer", "hold"]);
        let body =
            json!({ "id": id, "text": format!("mail {}", prompts::marker(number)), "deliver": deliver });
        for _ in 0..=self.random.below(2) {
            let sent = self.send(Method::POST, &session.path("/mail"), &body, &[202, 404, 409]).await;
            if let Some((202, receipt)) = sent {
                let known = self.deck.record(|record| {
                    record.count("mail");
                    record.mail.insert(id.clone(), (session.id.clone(), receipt.clone()))
                });
                if let Some((_, known)) = known
                    && known["seq"] != receipt["seq"]
                {
                    let what = format!("mail {id} has two receipts: {known} and {receipt}");
                    self.deck.violation(Some(&session.id), what);
                }
            }
        }
    }

    pub(super) fn drop_mail(&mut self, session: &StormSession) {
        let number = self.mark_next(session);
        let id = format!("m{number}");
        let folder = self.deck.home.join("mail").join(&session.id);
        let text = json!({ "id": id, "text": format!("file {}", prompts::marker(number)) }).to_string();
        let (written, renamed) = (folder.join("tmp").join(&id), folder.join("new").join(&id));
        // The folder is gone if the session was purged meanwhile.
        if std::fs::write(&written, text).is_ok() && std::fs::rename(&written, &renamed).is_ok() {
            self.deck.record(|record| {
                record.count("dropped");
                record.dropped_mail.insert(id, session.id.clone());
            });
        }
    }

    pub(super) async fn claim_mail(&mut self, session: &StormSession) {
        let claim = json!({ "max": 2, "limit_s": 2 });
        let claimed = self.post_keyed(&session.path("/mail/claim"), &claim, &[200, 404, 409]).await;
        let Some((200, claimed)) = claimed else { return };
        for mail in claimed.as_array().into_iter().flatten() {
            let id = mail["id"].as_str().unwrap_or_default();
            let body = json!({ "claim": mail["claim"] });
            let path = session.path(&format!("/mail/{id}/ack"));
            if self.random.below(3) > 0
                && let Some((200, _)) = self.send(Method::POST, &path, &body, &[200, 404, 409]).await
            {
                self.deck.record(|record| record.acknowledged_mail.insert(id.to_owned()));
            }
        }
    }
}
