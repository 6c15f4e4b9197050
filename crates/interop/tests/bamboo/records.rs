//! Each side finds the other's worker records in a shared folder.

use bamboo_subagent::{AgentRecord, Fabric};
use qd_protocol::Millis;
use qd_worker_sdk::announce::{LeaseAnnouncement, live_records, record_of_this_process};

#[tokio::test]
async fn both_find_each_other_in_one_folder() {
    let dir = tempfile::tempdir().unwrap();
    let fabric = Fabric::at(dir.path());
    let ours = record_of_this_process("ours", "echo", "ws://127.0.0.1:1");
    let announcement = LeaseAnnouncement::publish(dir.path(), ours).unwrap();
    let found: Vec<AgentRecord> = fabric.discover().await.unwrap();
    assert_eq!((found[0].agent_id.as_str(), found[0].endpoint.as_str()), ("ours", "ws://127.0.0.1:1"));

    let theirs = AgentRecord { agent_id: "theirs".to_owned(), ..found[0].clone() };
    fabric.publish(&theirs).await.unwrap();
    let names = || live_records(dir.path(), Millis::now()).into_iter().map(|record| record.agent_id);
    assert_eq!(names().collect::<Vec<_>>(), ["ours", "theirs"]);
    drop(announcement);
    assert_eq!(names().collect::<Vec<_>>(), ["theirs"]);
    fabric.withdraw("theirs").await.unwrap();
    assert_eq!(names().count(), 0);
}
