//! The trait of a spool, which keeps the updates that the daemon has not acknowledged, and an implementation in
//! memory. A spool does not look into its lines; each is one JSON document.

use std::collections::VecDeque;
use std::io;

use bytes::Bytes;
use qd_protocol::link::UpdateNumber;

/// Numbered lines, kept until they are trimmed. The calls block, so they are small and go to the page cache. Only
/// [`Spool::sync`] may take long; it runs on a thread that may block.
pub trait Spool: Send + 'static {
    /// Keeps these lines, each one [`AgentUpdate`](qd_protocol::link::AgentUpdate) as JSON, numbered from `first`
    /// upwards. `first` follows the last appended number, unless everything has been trimmed. On failure none of the
    /// lines are kept.
    fn append(&mut self, first: UpdateNumber, lines: &[Bytes]) -> io::Result<()>;

    /// Returns when everything appended would survive a power failure.
    fn sync(&mut self) -> io::Result<()>;

    /// Forgets everything up to and including this number. Trimming twice is harmless.
    fn trim(&mut self, upto: UpdateNumber) -> io::Result<()>;

    /// Returns the lines after this number in order, about `max_bytes` of them and at least one if there is any.
    fn read(&mut self, after: UpdateNumber, max_bytes: usize) -> io::Result<Vec<(UpdateNumber, Bytes)>>;

    /// How many bytes the spool holds.
    fn bytes(&self) -> u64;
}

/// A spool for workers whose updates need not survive the process.
#[derive(Debug, Default)]
pub struct MemorySpool {
    first: UpdateNumber,
    lines: VecDeque<Bytes>,
    bytes: u64,
}

impl Spool for MemorySpool {
    fn append(&mut self, first: UpdateNumber, lines: &[Bytes]) -> io::Result<()> {
        if self.lines.is_empty() {
            self.first = first;
        }
        self.lines.extend(lines.iter().cloned());
        self.bytes += lines.iter().map(|line| line.len() as u64).sum::<u64>();
        Ok(())
    }

    fn sync(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn trim(&mut self, upto: UpdateNumber) -> io::Result<()> {
        while self.first <= upto
            && let Some(line) = self.lines.pop_front()
        {
            self.first.0 += 1;
            self.bytes -= line.len() as u64;
        }
        if self.lines.is_empty() {
            self.lines = VecDeque::new();
        }
        Ok(())
    }

    fn read(&mut self, after: UpdateNumber, max_bytes: usize) -> io::Result<Vec<(UpdateNumber, Bytes)>> {
        let skipped = usize::try_from((after.0 + 1).saturating_sub(self.first.0)).unwrap_or(usize::MAX);
        let (mut found, mut bytes) = (Vec::new(), 0);
        for (line, number) in self.lines.iter().zip(self.first.0..).skip(skipped) {
            bytes += line.len();
            if !found.is_empty() && bytes > max_bytes {
                break;
            }
            found.push((UpdateNumber(number), line.clone()));
        }
        Ok(found)
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(texts: &[&'static str]) -> Vec<Bytes> {
        texts.iter().map(|text| Bytes::from_static(text.as_bytes())).collect()
    }

    fn numbers(spool: &mut MemorySpool, after: u64, max_bytes: usize) -> Vec<u64> {
        spool.read(UpdateNumber(after), max_bytes).unwrap().into_iter().map(|(number, _)| number.0).collect()
    }

    #[test]
    fn what_is_not_trimmed_is_read_in_order_and_a_little_at_a_time() {
        let mut spool = MemorySpool::default();
        spool.append(UpdateNumber(5), &lines(&["aa", "bb"])).unwrap();
        spool.append(UpdateNumber(7), &lines(&["cc", "dd"])).unwrap();
        assert_eq!(numbers(&mut spool, 0, 100), [5, 6, 7, 8]);
        assert_eq!(numbers(&mut spool, 5, 4), [6, 7]);
        assert_eq!(numbers(&mut spool, 5, 0), [6], "one at least");
        assert_eq!(numbers(&mut spool, 8, 100), [0; 0]);
        spool.trim(UpdateNumber(6)).unwrap();
        spool.trim(UpdateNumber(2)).unwrap();
        assert_eq!((numbers(&mut spool, 0, 100), spool.bytes()), (vec![7, 8], 4));
    }

    #[test]
    fn one_that_has_been_trimmed_to_nothing_goes_on_with_any_number() {
        let mut spool = MemorySpool::default();
        spool.append(UpdateNumber(1), &lines(&["aa"])).unwrap();
        spool.trim(UpdateNumber(9)).unwrap();
        assert_eq!(spool.bytes(), 0);
        spool.append(UpdateNumber(10), &lines(&["bb"])).unwrap();
        assert_eq!(numbers(&mut spool, 3, 100), [10]);
    }
}
