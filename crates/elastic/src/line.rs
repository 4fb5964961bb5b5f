//! Bytes to lines, and the rank put before each.
//!
//! A line ends with `\n`, or with `\r` as progress bars have it; output without an end is held
//! back until its end comes, so that lines of different ranks never mix.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// A line longer than this is handed on in pieces.
const LONGEST: usize = 64 * 1024;

/// How many of a rank's last lines are kept for the report.
const KEPT: usize = 20;

/// Collects bytes and gives out whole lines.
#[derive(Debug, Default)]
pub(crate) struct Lines {
    held: Vec<u8>,
}

impl Lines {
    /// Takes what was read and hands every line that is complete to `emit`, its end included.
    pub(crate) fn push(&mut self, bytes: &[u8], mut emit: impl FnMut(&[u8])) {
        self.held.extend_from_slice(bytes);
        let mut start = 0;
        while let Some(length) = first_line(&self.held[start..]) {
            emit(&self.held[start..start + length]);
            start += length;
        }
        self.held.drain(..start);
    }

    /// Hands out what is left, given an end.
    pub(crate) fn finish(&mut self, mut emit: impl FnMut(&[u8])) {
        if !self.held.is_empty() {
            if self.held.last() != Some(&b'\r') {
                self.held.push(b'\n');
            }
            emit(&self.held);
            self.held.clear();
        }
    }
}

/// The length of the first line, or `None` while its end has not come.
fn first_line(bytes: &[u8]) -> Option<usize> {
    let end = bytes.iter().position(|byte| matches!(byte, b'\n' | b'\r'));
    match end {
        Some(end) if bytes[end] == b'\n' => Some(end + 1),
        Some(end) => match bytes.get(end + 1) {
            Some(b'\n') => Some(end + 2),
            Some(_) => Some(end + 1),
            // Perhaps the first half of "\r\n".
            None => None,
        },
        None => (bytes.len() >= LONGEST).then_some(LONGEST),
    }
}

/// What stands before a rank's lines.
pub(crate) fn prefix(rank: usize, coloured: bool) -> String {
    if coloured {
        format!("\x1b[{}m[rank{rank}]:\x1b[0m ", 31 + rank % 6)
    } else {
        format!("[rank{rank}]: ")
    }
}

/// The last lines of a rank, which one thread writes and another reads.
#[derive(Clone, Debug, Default)]
pub(crate) struct SharedTail(Arc<(Mutex<Tail>, Condvar)>);

impl SharedTail {
    /// Remembers a line.
    pub(crate) fn push(&self, line: &[u8]) {
        self.tail().push(line);
    }

    /// Says that this was all.
    pub(crate) fn finish(&self) {
        self.tail().is_whole = true;
        self.0.1.notify_all();
    }

    /// The lines so far, oldest first.
    pub(crate) fn lines(&self) -> Vec<String> {
        self.tail().lines.iter().cloned().collect()
    }

    /// The same when all are there, or after `patience`: what a process has left behind may go on
    /// writing.
    pub(crate) fn whole_lines(&self, patience: Duration) -> Vec<String> {
        let (_, news) = &*self.0;
        let is_coming = |tail: &mut Tail| !tail.is_whole;
        drop(news.wait_timeout_while(self.tail(), patience, is_coming));
        self.lines()
    }

    fn tail(&self) -> MutexGuard<'_, Tail> {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The last lines of a rank.
#[derive(Debug, Default)]
struct Tail {
    lines: VecDeque<String>,
    is_whole: bool,
}

impl Tail {
    /// Remembers a line, and forgets the oldest when there are enough. A line that a progress bar
    /// will overwrite is not one.
    fn push(&mut self, line: &[u8]) {
        let text = String::from_utf8_lossy(line);
        let text = text.trim_end();
        if line.ends_with(b"\r") || text.is_empty() {
            return;
        }
        if self.lines.len() == KEPT {
            self.lines.pop_front();
        }
        self.lines.push_back(text.to_owned());
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn lines(chunks: &[&[u8]]) -> Vec<String> {
        let mut lines = Lines::default();
        let mut seen = Vec::new();
        let mut emit = |line: &[u8]| seen.push(String::from_utf8_lossy(line).into_owned());
        for chunk in chunks {
            lines.push(chunk, &mut emit);
        }
        lines.finish(&mut emit);
        seen
    }

    #[test]
    fn a_line_waits_for_its_end() {
        assert_eq!(lines(&[b"ab", b"c\nd"]), ["abc\n", "d\n"]);
        assert_eq!(lines(&[b""]), [""; 0]);
    }

    #[test]
    fn a_progress_bar_moves_on() {
        assert_eq!(
            lines(&[b"10%\r20%\r", b"done\n"]),
            ["10%\r", "20%\r", "done\n"]
        );
    }

    #[test]
    fn the_two_halves_of_an_end_stay_together() {
        assert_eq!(lines(&[b"a\r", b"\nb\r\n"]), ["a\r\n", "b\r\n"]);
    }

    #[test]
    fn a_line_without_end_does_not_fill_the_memory() {
        let long = vec![b'x'; LONGEST * 2 + 1];
        let lengths: Vec<_> = lines(&[&long]).iter().map(String::len).collect();
        assert_eq!(lengths, [LONGEST, LONGEST, 2]);
    }

    #[test]
    fn the_prefix_names_the_rank() {
        assert_eq!(prefix(12, false), "[rank12]: ");
        assert!(prefix(0, true).contains("[rank0]:"));
    }

    #[test]
    fn the_last_lines_are_kept_and_progress_is_not() {
        let tail = SharedTail::default();
        for i in 0..30 {
            tail.push(format!("line {i}\n").as_bytes());
            tail.push(b"10%\r");
            tail.push(b"\n");
        }
        let kept = tail.lines();
        assert_eq!(kept.len(), KEPT);
        assert_eq!(kept[0], "line 10");
        assert_eq!(kept[KEPT - 1], "line 29");
    }

    proptest! {
        #[test]
        fn no_byte_is_lost_however_it_is_cut(
            bytes in prop::collection::vec(prop::sample::select(b"ab\r\n".to_vec()), 0..60),
            cut in 0usize..60,
        ) {
            let cut = cut.min(bytes.len());
            let whole = lines(&[&bytes]);
            prop_assert_eq!(&whole, &lines(&[&bytes[..cut], &bytes[cut..]]));
            let text = String::from_utf8(bytes).unwrap();
            let joined = whole.concat();
            prop_assert_eq!(joined.strip_suffix('\n').unwrap_or(&joined), text.strip_suffix('\n').unwrap_or(&text));
        }
    }
}
