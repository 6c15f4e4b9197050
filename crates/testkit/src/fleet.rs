//! The operations of a fleet, over a client.

use serde_json::{Value, json};

use crate::client::{TestClient, TestResponse};
use crate::session::{TestSession, TestWorkspace};
use crate::stream::{TestEvent, TestEventStream};

#[derive(Debug, Clone)]
pub struct TestFleet {
    pub client: TestClient,
    pub workspace: String,
    pub id: String,
}

impl TestWorkspace {
    /// Starts a fleet from the text of its file.
    pub async fn fleet(&self, file: &str) -> TestFleet {
        let fleet = self.try_fleet(file).await.expect(201);
        let id = fleet["id"].as_str().expect("a fleet has an id").to_owned();
        TestFleet { client: self.client.clone(), workspace: self.id.clone(), id }
    }

    /// Starts a fleet from the text of its file, which may be refused.
    pub async fn try_fleet(&self, file: &str) -> TestResponse {
        let client = self.client.with_header("content-type", "application/yaml");
        client.request(hyper::Method::POST, &self.path("/fleets"), Some(file.to_owned().into())).await
    }
}

impl TestFleet {
    /// A path below the fleet.
    pub fn path(&self, rest: &str) -> String {
        format!("/v1/workspaces/{}/fleets/{}{rest}", self.workspace, self.id)
    }

    /// The current state of the fleet.
    pub async fn show(&self) -> Value {
        self.client.get(&self.path("")).await.expect(200)
    }

    /// The fleet's session with this name.
    pub async fn session(&self, name: &str) -> TestSession {
        let id = self.show().await["sessions"][name]["session_id"]
            .as_str()
            .expect("it has that session")
            .to_owned();
        TestSession { client: self.client.clone(), workspace: self.workspace.clone(), id }
    }

    /// The prompts that a session was given, in order.
    pub async fn prompts_of(&self, name: &str) -> Vec<String> {
        let runs = self.session(name).await.runs().await;
        runs.iter().map(|run| run["prompt"].as_str().expect("a run has a prompt").to_owned()).collect()
    }

    /// All events of the fleet's workspace, from the beginning and then live.
    pub async fn stream(&self) -> TestEventStream {
        self.client.stream(&format!("/v1/workspaces/{}/events?after=0", self.workspace)).await
    }

    /// Whether an event is one of the fleet's own.
    pub fn owns(&self, event: &TestEvent) -> bool {
        event.data["fleet_id"] == self.id.as_str()
    }

    /// Waits for an event of this kind, and returns the fleet's own events up to it.
    pub async fn events_until(&self, kind: &str) -> Vec<TestEvent> {
        let mut stream = self.stream().await;
        let events = stream.until(kind, |event| event.kind == kind && self.owns(event)).await;
        events.into_iter().filter(|event| self.owns(event)).collect()
    }

    /// Waits until the fleet has finished, and returns its state.
    pub async fn wait_for_end(&self) -> Value {
        self.events_until("fleet.finished").await;
        self.show().await
    }

    pub async fn cancel(&self) -> Value {
        self.client.post(&self.path("/cancel"), &json!({})).await.expect(200)
    }

    /// Waits until the fleet asks a person, and returns the ask's id.
    pub async fn wait_for_ask(&self) -> String {
        let events = self.events_until("ask.opened").await;
        let opened = events.iter().find(|event| event.kind == "ask.opened").expect("it was waited for");
        opened.data["id"].as_str().expect("an ask has an id").to_owned()
    }
}
