#![allow(clippy::all, clippy::unwrap_used, clippy::print_stdout)]
use qd_link::socket::*; use qd_link::*; use qd_protocol::link::*; use qd_protocol::worker::*; use qd_protocol::*;
use tokio::net::{UnixListener, UnixStream}; use std::time::Instant;
use tokio_tungstenite::tungstenite::protocol::Role;
struct R(String);
impl Route for R {
    async fn dial(&mut self) -> Result<Socket<Box<dyn Wire>>, Unreachable> {
        let s = UnixStream::connect(&self.0).await.map_err(|_| Unreachable::Later)?;
        Ok(Socket::upgraded(Box::new(s) as Box<dyn Wire>, Role::Client).await)
    }
    async fn remains(&mut self, _: UpNumber) -> Vec<Numbered> { vec![] }
}
fn ses(i: usize) -> SessionId { SessionId::parse(&format!("ses_{i}")).unwrap() }
fn wrk() -> WorkerId { WorkerId::parse("wrk_1").unwrap() }
fn run() -> RunId { RunId::parse("run_0123456789abcdef").unwrap() }
fn rss() -> u64 { let s = std::fs::read_to_string("/proc/self/status").unwrap(); s.lines().find(|l| l.starts_with("VmRSS")).unwrap().split_whitespace().nth(1).unwrap().parse().unwrap() }
fn opts(i: usize) -> SeatOptions { SeatOptions { session: ses(i), worker: wrk(), secret: Secret("s".into()), after: UpNumber(0), spool_max: 64<<20, software: "x".into(), keeper: None } }
fn lopts(i: usize) -> LinkOptions { LinkOptions { session: ses(i), worker: wrk(), secret: Secret("s".into()), taken: UpNumber(0), software: "x".into(), start: None } }
#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() {
    let a: Vec<String> = std::env::args().collect();
    let path = a[2].clone();
    match a[1].as_str() {
        "worker" => {
            let n: usize = a[3].parse().unwrap(); let many: usize = a[4].parse().unwrap();
            let mut seats = vec![]; 
            let l = UnixListener::bind(&path).unwrap();
            for i in 0..n { 
                let spool: Box<dyn Spool> = if a.len() > 5 { Box::new(FileSpool::create(std::path::Path::new(&format!("{}/{i}", a[5]))).unwrap()) } else { Box::new(MemorySpool::default()) };
                let s = Seat::new(opts(i), spool);
                s.seat(host(UpNumber(0), move |mut e: AgentEnd| async move { e.command().await; for _ in 0..many { e.say(Up::Said { run: run(), what: Said::Turn }).await.unwrap(); } std::future::pending().await })); seats.push(s); }
            let before = rss();
            let mut served = 0;
            loop { 
                let c = tokio::time::timeout(std::time::Duration::from_secs(2), l.accept()).await;
                match c { Ok(Ok((c, _))) => { served += 1; let seats = seats.clone(); tokio::spawn(Box::pin(async move { let mut s = Socket::upgraded(c, Role::Server).await; let h = greet(&mut s).await.unwrap(); let i: usize = h.session.as_str()[4..].parse().unwrap(); let seat = seats[i].clone(); drop(seats); seat.serve(s, h).await.ok(); })); }
                 _ => { if served >= n { println!("worker: {} KiB before, {} KiB after {served} connections: {} B each", before, rss(), (rss()-before)*1024/served as u64); if n > 1 { return; } } } }
            }
        }
        _ => {
            let n: usize = a[3].parse().unwrap(); let many: usize = a[4].parse().unwrap();
            let mut links: Vec<_> = (0..n).map(|i| AgentLink::open(lopts(i), R(path.clone()))).collect();
            let t = Instant::now();
            for link in &mut links { loop { match link.hear().await { Heard::Attached { .. } => break, _ => {} } } link.send(Down::Steer { number: Number(1), run: run(), text: String::new() }); }
            for link in &mut links { let mut c = 0; while c < many { if let Heard::Said(s) = link.hear().await { c += s.len(); link.ack(s.last().unwrap().number); } } }
            let d = t.elapsed(); println!("daemon: {} events in {:?}: {:.0}/s", n*many, d, (n*many) as f64 / d.as_secs_f64());
            if n > 1 { tokio::time::sleep(std::time::Duration::from_secs(8)).await; }
        }
    }
}
