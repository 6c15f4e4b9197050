//! A key for a state of the simulation, without anything that can no longer matter, so that the walk recognises a
//! state whichever path led to it.

use std::hash::{Hash, Hasher};

use qd_core::session::{AskEntry, SessionState};
use qd_protocol::link::UpdateNumber;
use qd_protocol::{ClockReading, EventNumber, Millis, WorkerId};

use super::SimulatedSession;

impl SimulatedSession {
    /// The key of this state. Numbers are replaced by their rank and times are dropped, so that states with the same
    /// future have the same key. `text` is overwritten; a walk has one for all its states.
    pub(crate) fn key(&self, text: &mut Vec<u8>) -> u128 {
        let mut state = self.state.clone();
        let mut numbers: Vec<u64> = Vec::new();
        each_number(&mut state, &mut |number| numbers.push(number.0));
        self.worker.each_number(&mut |number| numbers.push(number.0));
        numbers.sort_unstable();
        numbers.dedup();
        let rank =
            |number: EventNumber| EventNumber(numbers.binary_search(&number.0).map_or(0, |at| at as u64 + 1));
        each_number(&mut state, &mut |number| *number = rank(*number));
        forget_times(&mut state);
        state.number = EventNumber(0);
        state.last_update_number = UpdateNumber(0);
        // Far from its limit, what an agent has said decides nothing.
        state.output_bytes = 0;
        if state.worker.is_some() {
            state.worker = Some(WorkerId::of_session(&state.id, EventNumber(0)));
        }
        let mut key = WorldDigest::default();
        text.clear();
        serde_json::to_writer(&mut *text, &state).unwrap();
        key.write(text);
        self.worker.canonical(rank, &self.budget).hash(&mut key);
        let Self { observer, budget, halted, quota_until, slot_free, in_line, dying, batching, .. } = self;
        (observer, budget, halted, quota_until, slot_free, in_line, dying, batching).hash(&mut key);
        (self.prompts, &self.children).hash(&mut key);
        // Effects that wait for the end of their batch: their numbers do not matter, only what they do.
        self.open_batch.is_some().hash(&mut key);
        self.open_batch.iter().flatten().for_each(|effect| std::mem::discriminant(effect).hash(&mut key));
        key.whole()
    }
}

/// Time passes only from deadline to deadline, and crashes never expire here, so no point in time matters.
fn forget_times(state: &mut SessionState) {
    state.updated_at = Millis(0);
    // Nothing depends on when the last run ended.
    state.last_finished = None;
    state.last_uptime = None;
    state.worker_stopping_since.iter_mut().for_each(|at| *at = ClockReading::default());
    state.crashes.iter_mut().for_each(|at| *at = ClockReading::default());
    for run in &mut state.runs {
        run.accepted_at = Millis(0);
        if let Some(started) = &mut run.execution {
            started.started_at = ClockReading::default();
            started.waited_ms = 0;
            started.waiting_since.iter_mut().for_each(|at| *at = ClockReading::default());
            for mark in started.stop.iter_mut().chain(&mut started.kill) {
                mark.at = ClockReading::default();
            }
        }
    }
    for entry in state.asks.values_mut() {
        if let AskEntry::Pending(ask) = entry {
            ask.opened_at = Millis(0);
        }
    }
}

fn each_number(state: &mut SessionState, visit: &mut dyn FnMut(&mut EventNumber)) {
    state.pending_child_cancel.iter_mut().for_each(&mut *visit);
    for run in &mut state.runs {
        for steer in &mut run.steers {
            visit(&mut steer.accepted);
            steer.sent.iter_mut().for_each(&mut *visit);
        }
        if let Some(started) = &mut run.execution {
            visit(&mut started.number);
            for mark in started.stop.iter_mut().chain(&mut started.kill) {
                visit(&mut mark.number);
            }
        }
    }
    for entry in state.asks.values_mut() {
        if let AskEntry::Answered { number, .. } = entry {
            visit(number);
        }
    }
}

/// A fast 128-bit hash: the walk takes millions of keys, and no two states may share one.
#[derive(Default)]
struct WorldDigest {
    low: u64,
    high: u64,
}

impl WorldDigest {
    fn whole(&self) -> u128 {
        u128::from(self.high) << 64 | u128::from(self.low)
    }

    fn fold(one: u64, other: u64) -> u64 {
        let product = u128::from(one) * u128::from(other);
        (product >> 64) as u64 ^ product as u64
    }
}

impl Hasher for WorldDigest {
    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.write_u64(u64::from_le_bytes(word));
        }
        self.write_u64(bytes.len() as u64);
    }

    fn write_u8(&mut self, byte: u8) {
        self.write_u64(byte.into());
    }

    fn write_u64(&mut self, word: u64) {
        self.low = Self::fold(self.low ^ word ^ 0x9e37_79b9_7f4a_7c15, 0xd6e8_feb8_6659_fd93);
        self.high =
            Self::fold(self.high.rotate_left(23) ^ word ^ 0xc2b2_ae3d_27d4_eb4f, 0xff51_afd7_ed55_8ccd);
    }

    fn finish(&self) -> u64 {
        self.low ^ self.high
    }
}
