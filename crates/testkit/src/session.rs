//! The operations of a workspace and a session, over a client. Paths and statuses are written here once, so that a
//! test reads like the rule that it checks. An operation that a test expects to be refused has a `try_` variant.

use serde_json::{Value, json};

use crate::client::{TestClient, TestResponse};
use crate::script::steps;
use crate::stream::{TestEvent, TestEventStream};

/// A project directory that the daemon knows.
#[derive(Debug, Clone)]
pub struct TestWorkspace {
    pub client: TestClient,
    pub id: String,
}

impl TestWorkspace {
    /// A path below the workspace.
    pub fn path(&self, rest: &str) -> String {
        format!("/v1/workspaces/{}{rest}", self.id)
    }

    pub async fn session(&self, agent: &str) -> TestSession {
        self.session_with(json!({ "agent": agent })).await
    }

    pub async fn session_with(&self, settings: Value) -> TestSession {
        let session = self.try_session(settings).await.expect(201);
        TestSession {
            client: self.client.clone(),
            workspace: self.id.clone(),
            id: session["id"].as_str().expect("a session has an id").to_owned(),
        }
    }

    /// A new session, if it is allowed.
    pub async fn try_session(&self, settings: Value) -> TestResponse {
        self.client.post(&self.path("/sessions"), &settings).await
    }

    /// The attached event stream. `query` begins with `?` or is empty.
    pub async fn stream(&self, query: &str) -> TestEventStream {
        self.client.stream(&self.path(&format!("/events{query}"))).await.wait_until_ready().await
    }
}

#[derive(Debug, Clone)]
pub struct TestSession {
    pub client: TestClient,
    pub workspace: String,
    pub id: String,
}

impl TestSession {
    /// A path below the session.
    pub fn path(&self, rest: &str) -> String {
        format!("/v1/workspaces/{}/sessions/{}{rest}", self.workspace, self.id)
    }

    /// A path below the session's agent.
    pub fn agent_path(&self, rest: &str) -> String {
        format!("/v1/workspaces/{}/agent/sessions/{}{rest}", self.workspace, self.id)
    }

    /// A path below the workspace.
    pub fn workspace_path(&self, rest: &str) -> String {
        format!("/v1/workspaces/{}{rest}", self.workspace)
    }

    /// The same session with another client.
    #[must_use]
    pub fn with_client(&self, client: TestClient) -> Self {
        Self { client, ..self.clone() }
    }

    /// A new session below this one.
    pub async fn create_child(&self, mut settings: Value) -> TestSession {
        settings["parent"] = json!(self.id);
        TestWorkspace { client: self.client.clone(), id: self.workspace.clone() }.session_with(settings).await
    }

    /// Sends a prompt, which may be refused.
    pub async fn try_prompt(&self, prompt: &str) -> TestResponse {
        self.post_run(&json!({ "prompt": prompt })).await
    }

    /// Sends a prompt with a run id of our own, which may be refused.
    pub async fn try_prompt_as(&self, run: &str, prompt: &str) -> TestResponse {
        self.post_run(&json!({ "prompt": prompt, "run_id": run })).await
    }

    /// Sends a prompt with this body plus the session id.
    pub async fn post_run(&self, body: &Value) -> TestResponse {
        let mut body = body.clone();
        body["session_id"] = json!(self.id);
        self.client.post(&self.workspace_path("/agent"), &body).await
    }

    /// Sends a prompt and returns the run id.
    pub async fn prompt(&self, prompt: &str) -> String {
        let receipt = self.try_prompt(prompt).await.expect(202);
        receipt["run_id"].as_str().expect("a receipt names its run").to_owned()
    }

    /// Prompts a `script` session with steps, and returns the run id.
    pub async fn prompt_script(&self, script: &[Value]) -> String {
        self.prompt(&steps(script)).await
    }

    /// Prompts a `script` session with steps and a run id of our own, which is returned.
    pub async fn prompt_script_as(&self, run: &str, script: &[Value]) -> String {
        self.try_prompt_as(run, &steps(script)).await.expect(202);
        run.to_owned()
    }

    /// Prompts a `script` session with steps, waits, and returns the finished run.
    pub async fn run_script(&self, script: &[Value]) -> Value {
        self.wait(&self.prompt_script(script).await).await
    }

    /// Waits for the end of a run, and returns it.
    pub async fn wait(&self, run: &str) -> Value {
        self.client.get(&self.workspace_path(&format!("/runs/{run}/wait?timeout_s=25"))).await.expect(200)
    }

    /// The current state of a run.
    pub async fn run(&self, run: &str) -> Value {
        self.client.get(&self.workspace_path(&format!("/runs/{run}"))).await.expect(200)
    }

    pub async fn runs(&self) -> Vec<Value> {
        self.client.get(&self.workspace_path(&format!("/runs?session={}", self.id))).await.list()
    }

    /// Cancels the session's runs.
    pub async fn cancel(&self) -> Value {
        self.client.post_empty(&self.agent_path("/cancel")).await.expect(200)
    }

    pub async fn cancel_run(&self, run: &str) -> Value {
        self.client.post(&self.agent_path("/cancel"), &json!({ "run_id": run })).await.expect(200)
    }

    /// Steers the active turn, which may be refused.
    pub async fn try_steer(&self, text: &str) -> TestResponse {
        self.client.post(&self.agent_path("/steer"), &json!({ "text": text })).await
    }

    /// Steers the active turn.
    pub async fn steer(&self, text: &str) -> Value {
        self.try_steer(text).await.expect(202)
    }

    /// The runs that wait.
    pub async fn queue(&self) -> Vec<Value> {
        self.client.get(&self.agent_path("/queue")).await.list()
    }

    /// The current state of the session.
    pub async fn show(&self) -> Value {
        self.client.get(&self.path("")).await.expect(200)
    }

    pub async fn patch(&self, change: Value) -> Value {
        self.try_patch(change).await.expect(200)
    }

    /// Changes the session, which may be refused.
    pub async fn try_patch(&self, change: Value) -> TestResponse {
        self.client.patch(&self.path(""), &change).await
    }

    pub async fn close(&self) {
        let response = self.client.delete(&self.path("")).await;
        assert!(matches!(response.status, 200 | 202 | 204), "{response}");
    }

    pub async fn messages(&self) -> Vec<Value> {
        self.client.get(&self.path("/messages")).await.list()
    }

    /// All events, read page by page.
    pub async fn events(&self) -> Vec<TestEvent> {
        let (mut events, mut after) = (Vec::new(), 0);
        loop {
            let page =
                self.client.get(&self.path(&format!("/events?after={after}&limit=500"))).await.expect(200);
            let more: Vec<TestEvent> =
                serde_json::from_value(page["events"].clone()).expect("a page of events");
            if more.is_empty() {
                return events;
            }
            after = page["next_after"].as_u64().expect("a page says where it ended");
            events.extend(more);
        }
    }

    /// The events of one run.
    pub async fn events_of(&self, run: &str) -> Vec<TestEvent> {
        let mut events = self.events().await;
        events.retain(|event| event.run_id.as_deref() == Some(run));
        events
    }

    /// The attached event stream. `query` begins with `&` or is empty.
    pub async fn stream(&self, query: &str) -> TestEventStream {
        let path = self.workspace_path(&format!("/events?session={}{query}", self.id));
        self.client.stream(&path).await.wait_until_ready().await
    }

    /// Waits until an event that matches `wanted` is journalled, and returns it.
    pub async fn wait_for_event(&self, what: &str, wanted: impl FnMut(&TestEvent) -> bool) -> TestEvent {
        let mut events = self.stream("&after=0").await.until(what, wanted).await;
        events.pop().expect("`until` gives at least the event it waited for")
    }

    /// Waits until a run has an event of this kind, and returns it.
    pub async fn wait_for_run_event(&self, run: &str, kind: &str) -> TestEvent {
        self.wait_for_event(&format!("{kind} of {run}"), |event| event.is_of_run(run, kind)).await
    }

    /// Waits until the agent has received the run's prompt.
    pub async fn wait_for_start(&self, run: &str) {
        self.wait_for_run_event(run, "run.started").await;
    }

    /// Waits until a run asks something, and returns the ask's id.
    pub async fn wait_for_ask(&self, run: &str) -> String {
        ask_id(&self.wait_for_run_event(run, "ask.opened").await)
    }

    /// Runs one step that asks, answers the ask, and returns the finished run.
    pub async fn run_with_answer(&self, step: Value, answer: Value) -> Value {
        let run = self.prompt_script(&[step]).await;
        let ask = self.wait_for_ask(&run).await;
        self.client.answer_ask(&ask, &answer).await.expect(200);
        self.wait(&run).await
    }
}

/// The id of the ask that an event is about.
#[track_caller]
pub fn ask_id(event: &TestEvent) -> String {
    event.data["ask_id"].as_str().or(event.data["id"].as_str()).expect("it is an event of an ask").to_owned()
}
