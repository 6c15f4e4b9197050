//! Our client and theirs behind one interface: start a run, read it to its end, cancel it.

use bamboo_subagent::{ChildClient, ChildFrame, ParentFrame, RunSpec};
use qd_protocol::frame::plain::PlainWorkerFrame;
use qd_worker_sdk::{PlainClient, RunAssignment};

use crate::served::Side;

pub(crate) enum Peer {
    Ours(Box<PlainClient>),
    Theirs(ChildClient),
}

impl Peer {
    pub(crate) async fn connect(side: Side, endpoint: &str) -> Self {
        match side {
            Side::Ours | Side::Product => Self::Ours(Box::new(
                PlainClient::connect(endpoint, None).await.expect("the worker accepts the connection"),
            )),
            Side::Theirs => {
                Self::Theirs(ChildClient::connect(endpoint).await.expect("the worker accepts the connection"))
            }
        }
    }

    /// Starts a run that outputs `words` words. The product's `echo` outputs its assignment, which is one word.
    pub(crate) async fn start(&mut self, words: u64) {
        let assignment = words.to_string();
        match self {
            Self::Ours(client) => client
                .start_run(RunAssignment::from(assignment.as_str()))
                .await
                .expect("the connection is open"),
            Self::Theirs(client) => {
                let spec = RunSpec { assignment, reasoning_effort: None, messages: Vec::new() };
                client.send(ParentFrame::Run(spec)).await.expect("the connection is open");
            }
        }
    }

    /// Reads the run to its terminal and returns the number of words received.
    pub(crate) async fn finish(&mut self) -> u64 {
        let mut words = 0;
        loop {
            let (is_word, is_end) = match self {
                Self::Ours(client) => match client.next_frame().await.expect("the connection is open") {
                    PlainWorkerFrame::Event { event } => (event["type"] == "token", false),
                    PlainWorkerFrame::Terminal { .. } => (false, true),
                    PlainWorkerFrame::ApprovalRequest { .. } => (false, false),
                },
                Self::Theirs(client) => match client.next_frame().await.expect("the connection is open") {
                    Some(ChildFrame::Event { event }) => (event["type"] == "token", false),
                    Some(ChildFrame::ApprovalRequest { .. }) => (false, false),
                    Some(ChildFrame::Terminal { .. }) | None => (false, true),
                },
            };
            words += u64::from(is_word);
            if is_end {
                return words;
            }
        }
    }

    pub(crate) async fn cancel(&mut self) {
        match self {
            Self::Ours(client) => client.cancel().await.expect("the connection is open"),
            Self::Theirs(client) => client.send(ParentFrame::Cancel).await.expect("the connection is open"),
        }
    }
}
