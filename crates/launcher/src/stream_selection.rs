//! Which output streams of which ranks an option selects, in torchrun's notation: `3`, or `0:1,2:3`.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use crate::output::Stream;

/// The selected streams: 0 is none, 1 stdout, 2 stderr, 3 both.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
struct Streams(u8);

/// Streams of all ranks, or of some of them.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct StreamSelection {
    /// For ranks that are not named.
    others: Streams,
    by_local_rank: BTreeMap<usize, Streams>,
}

/// The text does not select streams.
#[derive(Clone, Debug, thiserror::Error)]
#[error(
    "`{0}` does not select output streams: write 0 (none), 1 (stdout), 2 (stderr) or 3 (both), or such a number for some local \
     ranks, as in `0:3,1:2`"
)]
pub struct InvalidSelection(String);

impl StreamSelection {
    /// Whether nothing is selected.
    pub fn is_empty(&self) -> bool {
        let mut named = self.by_local_rank.values();
        self.others.0 == 0 && named.all(|streams| streams.0 == 0)
    }

    /// Whether a stream of a local rank is selected.
    pub(crate) fn contains(&self, local_rank: usize, stream: Stream) -> bool {
        let streams = self.by_local_rank.get(&local_rank).unwrap_or(&self.others);
        let bit = match stream {
            Stream::Stdout => 1,
            Stream::Stderr => 2,
        };
        streams.0 & bit != 0
    }
}

fn streams(text: &str) -> Option<Streams> {
    let number: u8 = text.parse().ok()?;
    (number <= 3).then_some(Streams(number))
}

impl FromStr for StreamSelection {
    type Err = InvalidSelection;

    fn from_str(text: &str) -> Result<StreamSelection, InvalidSelection> {
        let invalid = || InvalidSelection(text.to_owned());
        if let Some(others) = streams(text) {
            return Ok(StreamSelection {
                others,
                by_local_rank: BTreeMap::new(),
            });
        }
        let of_rank = |entry: &str| {
            let (rank, number) = entry.split_once(':')?;
            Some((rank.parse().ok()?, streams(number)?))
        };
        let entries = text
            .split(',')
            .map(|entry| of_rank(entry).ok_or_else(invalid));
        Ok(StreamSelection {
            others: Streams::default(),
            by_local_rank: entries.collect::<Result<_, _>>()?,
        })
    }
}

/// The notation of the option.
impl fmt::Display for StreamSelection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.by_local_rank.is_empty() {
            return write!(f, "{}", self.others.0);
        }
        let entries = self.by_local_rank.iter();
        let entries = entries.map(|(rank, streams)| format!("{rank}:{}", streams.0));
        f.write_str(&entries.collect::<Vec<String>>().join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_for_all_ranks_and_a_list_for_the_ranks_in_it() -> Result<(), InvalidSelection> {
        let selected = |text: &str| -> Result<Vec<(usize, Stream)>, InvalidSelection> {
            let selection: StreamSelection = text.parse()?;
            assert_eq!(selection.to_string(), text);
            let all = (0..3).flat_map(|rank| [(rank, Stream::Stdout), (rank, Stream::Stderr)]);
            Ok(all
                .filter(|(rank, stream)| selection.contains(*rank, *stream))
                .collect())
        };
        assert_eq!(selected("0")?, []);
        assert_eq!(selected("3")?.len(), 6);
        assert_eq!(
            selected("2")?,
            [
                (0, Stream::Stderr),
                (1, Stream::Stderr),
                (2, Stream::Stderr)
            ]
        );
        let two = [
            (0, Stream::Stdout),
            (2, Stream::Stdout),
            (2, Stream::Stderr),
        ];
        assert_eq!(selected("0:1,1:0,2:3,17:3")?, two);
        assert!("0:0".parse::<StreamSelection>()?.is_empty());
        for text in ["", "4", "-1", "0:4", "0:1,", "a:1", "0:1;1:1"] {
            assert!(text.parse::<StreamSelection>().is_err(), "{text}");
        }
        Ok(())
    }
}
