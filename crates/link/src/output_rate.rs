//! How fast an agent may report. It may report a minute's worth at once; then it waits until the rest of the minute has
//! made up for it. Nothing is lost. No task or lock is known here.

use std::time::Duration;

use tokio::time::Instant;

/// The period over which an agent's output is counted.
const PERIOD: Duration = Duration::from_secs(60);

/// The rate of one agent.
#[derive(Debug)]
pub(crate) struct OutputRate {
    bytes_per_period: f64,
    /// What may be reported at once. Below zero if more was reported, for which the agent waits.
    available: f64,
    counted_at: Instant,
    /// Whether people have been told, and the agent has not become much slower since.
    is_noticed: bool,
}

/// What follows from a report.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RateWait {
    /// How long the agent waits before it reports this.
    pub(crate) wait: Duration,
    /// Whether people should be told that the agent waits.
    pub(crate) is_news: bool,
}

impl OutputRate {
    pub(crate) fn new(bytes_per_minute: u64, now: Instant) -> Self {
        let bytes_per_period = bytes_per_minute.max(1) as f64;
        Self { bytes_per_period, available: bytes_per_period, counted_at: now, is_noticed: false }
    }

    /// Counts a report of so many bytes. `None` if the agent need not wait.
    pub(crate) fn count(&mut self, bytes: u64, now: Instant) -> Option<RateWait> {
        let passed = now.duration_since(self.counted_at).as_secs_f64() / PERIOD.as_secs_f64();
        let refilled = self.available + passed * self.bytes_per_period;
        self.counted_at = now;
        self.available = refilled.min(self.bytes_per_period) - bytes as f64;
        if self.available >= 0.0 {
            self.is_noticed &= self.available < self.bytes_per_period / 2.0;
            return None;
        }
        let wait = PERIOD.mul_f64(-self.available / self.bytes_per_period);
        Some(RateWait { wait, is_news: !std::mem::replace(&mut self.is_noticed, true) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_minutes_worth_passes_at_once_and_the_rest_at_the_rate() {
        let mut rate = OutputRate::new(6000, Instant::now());
        for _ in 0..6 {
            assert_eq!(rate.count(1000, Instant::now()), None);
        }
        let first = rate.count(1000, Instant::now()).unwrap();
        assert_eq!((first.wait, first.is_news), (Duration::from_secs(10), true));
        tokio::time::advance(first.wait).await;
        let second = rate.count(1000, Instant::now()).unwrap();
        assert_eq!((second.wait, second.is_news), (Duration::from_secs(10), false));
        tokio::time::advance(Duration::from_secs(60)).await;
        assert_eq!(rate.count(1000, Instant::now()), None);
        tokio::time::advance(Duration::from_secs(600)).await;
        assert_eq!(rate.count(100, Instant::now()), None);
        assert!(rate.count(7000, Instant::now()).unwrap().is_news, "it had become slow in between");
    }
}
