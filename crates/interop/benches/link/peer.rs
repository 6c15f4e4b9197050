//! Either client behind one face: start a run, read it to its end, cancel it.

use bamboo_subagent::{ChildClient, ChildFrame, ParentFrame, RunSpec};
use qd_link::{PlainClient, RunAssignment};
use qd_protocol::frame::plain::PlainWorkerFrame;

use crate::served::Side;

pub(crate) enum Peer {
    Ours(Box<PlainClient>),
    Theirs(ChildClient),
}

impl Peer {
    pub(crate) async fn connect(side: Side, endpoint: &str) -> Self {
        match side {
            Side::Ours => {
                Self::Ours(Box::new(PlainClient::connect(endpoint, None).await.expect("it lets us in")))
            }
            Side::Theirs => Self::Theirs(ChildClient::connect(endpoint).await.expect("it lets us in")),
        }
    }

    /// Starts a run that says so many words.
    pub(crate) async fn start(&mut self, words: u64) {
        let assignment = words.to_string();
        match self {
            Self::Ours(client) => {
                client.start_run(RunAssignment::from(assignment.as_str())).await.expect("it is there")
            }
            Self::Theirs(client) => {
                let spec = RunSpec { assignment, reasoning_effort: None, messages: Vec::new() };
                client.send(ParentFrame::Run(spec)).await.expect("it is there");
            }
        }
    }

    /// Reads the run to its terminal; how many words came.
    pub(crate) async fn finish(&mut self) -> u64 {
        let mut words = 0;
        loop {
            let (is_word, is_end) = match self {
                Self::Ours(client) => match client.next_frame().await.expect("it is there") {
                    PlainWorkerFrame::Event { event } => (event["type"] == "token", false),
                    PlainWorkerFrame::Terminal { .. } => (false, true),
                    PlainWorkerFrame::ApprovalRequest { .. } => (false, false),
                },
                Self::Theirs(client) => match client.next_frame().await.expect("it is there") {
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
            Self::Ours(client) => client.cancel().await.expect("it is there"),
            Self::Theirs(client) => client.send(ParentFrame::Cancel).await.expect("it is there"),
        }
    }
}
