//! Megatron-LM's flags by name: which there are, and how many words each takes.

use std::collections::BTreeMap;

use super::super::FrameworkError;
use super::super::arguments::{CommandLine, count};
use super::super::suggest::unknown;
use super::FRAMEWORK;

/// Every flag of core 0.16.1's `pretrain_gpt.py`: `--flag words`, where `+` and `*` are any number.
const KNOWN: &str = include_str!("flags-0.16.1.txt");

/// Flags with the words that follow them.
#[derive(Debug)]
pub(super) struct Flags {
    values: BTreeMap<String, Vec<String>>,
    /// How many ranks torchrun starts, where it is told.
    pub world: Option<usize>,
}

impl Flags {
    /// The flags of a command line; unknown ones are refused, as Megatron does.
    pub fn parse(text: &str) -> Result<Flags, FrameworkError> {
        let line = CommandLine::parse(FRAMEWORK, text)?;
        let mut values = BTreeMap::new();
        let mut words = line.arguments.into_iter().peekable();
        while let Some(word) = words.next() {
            let (flag, inline) = match word.split_once('=') {
                Some((flag, value)) => (flag.to_owned(), Some(value.to_owned())),
                None => (word, None),
            };
            let Some(arity) = arity(&flag) else {
                let known = KNOWN.lines().filter_map(|line| line.split(' ').next());
                return Err(unknown(FRAMEWORK, &flag, known));
            };
            let most = match arity {
                _ if inline.is_some() => 0,
                "0" => 0,
                "+" | "*" => usize::MAX,
                number => number.parse().unwrap_or(1),
            };
            let mut given: Vec<String> = inline.into_iter().collect();
            while given.len() < most {
                let Some(value) = words.next_if(|next| !is_flag(next)) else {
                    break;
                };
                given.push(value);
            }
            if given.is_empty() && !matches!(arity, "0" | "*") {
                return Err(FRAMEWORK.syntax(format!("{flag} is followed by nothing")));
            }
            values.insert(flag, given);
        }
        Ok(Flags {
            values,
            world: line.world,
        })
    }

    /// Whether a flag is there.
    pub fn has(&self, flag: &str) -> bool {
        self.values.contains_key(flag)
    }

    /// What follows a flag, as one text.
    pub fn get(&self, flag: &str) -> Option<String> {
        self.values.get(flag).map(|words| words.join(" "))
    }

    /// The number that follows a flag.
    pub fn number(&self, flag: &str) -> Result<Option<usize>, FrameworkError> {
        self.get(flag).map(|value| count(flag, &value)).transpose()
    }

    /// The number that follows a flag, or 1.
    pub fn degree(&self, flag: &str) -> Result<usize, FrameworkError> {
        Ok(self.number(flag)?.unwrap_or(1))
    }

    /// The number that follows a flag without which Megatron does not start.
    pub fn needed(&self, flag: &'static str) -> Result<usize, FrameworkError> {
        let number = self.number(flag)?;
        number.ok_or_else(|| FRAMEWORK.untold(flag, "give the flag"))
    }
}

/// Whether the flag exists; how many words it takes.
pub(super) fn arity(flag: &str) -> Option<&'static str> {
    let mut lines = KNOWN.lines().filter_map(|line| line.split_once(' '));
    lines
        .find(|(known, _)| *known == flag)
        .map(|(_, arity)| arity)
}

/// Whether a word begins a flag: a minus with a digit is a number.
fn is_flag(word: &str) -> bool {
    word.starts_with("--")
}
