//! Parses Megatron-LM's flags by name and number of values.

use std::collections::BTreeMap;

use super::super::FrameworkError;
use super::super::arguments::{CommandLine, count, readable};
use super::super::shell::Word;
use super::super::suggest::unknown;
use super::FRAMEWORK;

/// Every flag of `pretrain_gpt.py` (Megatron Core 0.16.1) with its number of values; `+` and `*` mean any number.
const KNOWN: &str = include_str!("flags-0.16.1.txt");

/// The given flags with their values.
#[derive(Debug)]
pub(super) struct Flags {
    values: BTreeMap<String, Vec<String>>,
    /// The number of ranks that torchrun starts, if its flags determine it.
    pub world: Option<usize>,
}

impl Flags {
    /// Parses a command line. Unknown flags are rejected, as Megatron does.
    pub fn parse(text: &str) -> Result<Flags, FrameworkError> {
        let line = CommandLine::parse(FRAMEWORK, text)?;
        let mut values = BTreeMap::new();
        let mut words = line.arguments.into_iter().peekable();
        while let Some(word) = words.next() {
            let (flag, inline) = match word.text.split_once('=') {
                Some((flag, value)) => {
                    let value = Word {
                        text: value.to_owned(),
                        problem: word.problem.clone(),
                    };
                    (flag.to_owned(), Some(value))
                }
                None => (readable(FRAMEWORK, word)?, None),
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
            let mut given: Vec<Word> = inline.into_iter().collect();
            while given.len() < most {
                let Some(value) = words.next_if(|next| !is_flag(&next.text)) else {
                    break;
                };
                given.push(value);
            }
            if given.is_empty() && !matches!(arity, "0" | "*") {
                return Err(FRAMEWORK.syntax(format!("{flag} needs a value")));
            }
            let given = given.into_iter().map(|value| {
                if is_place(&flag) {
                    Ok(value.text)
                } else {
                    readable(FRAMEWORK, value)
                }
            });
            values.insert(flag.clone(), given.collect::<Result<_, _>>()?);
        }
        Ok(Flags {
            values,
            world: line.world,
        })
    }

    /// Sets a flag that is absent. Returns whether it was.
    pub fn set_default(&mut self, flag: &str, value: &str) -> bool {
        let is_absent = !self.has(flag);
        if is_absent {
            self.values.insert(flag.to_owned(), vec![value.to_owned()]);
        }
        is_absent
    }

    /// All flags with their values, joined by spaces.
    pub fn iter(&self) -> impl Iterator<Item = (&str, String)> {
        let values = self.values.iter();
        values.map(|(flag, words)| (flag.as_str(), words.join(" ")))
    }

    /// Whether the flag is given.
    pub fn has(&self, flag: &str) -> bool {
        self.values.contains_key(flag)
    }

    /// The flag's values, joined by spaces.
    pub fn get(&self, flag: &str) -> Option<String> {
        self.values.get(flag).map(|words| words.join(" "))
    }

    /// The flag's value as a number.
    pub fn number(&self, flag: &str) -> Result<Option<usize>, FrameworkError> {
        self.get(flag).map(|value| count(flag, &value)).transpose()
    }

    /// The flag's value as a number, by default 1.
    pub fn degree(&self, flag: &str) -> Result<usize, FrameworkError> {
        Ok(self.number(flag)?.unwrap_or(1))
    }

    /// The value of a flag that Megatron requires.
    pub fn needed(&self, flag: &'static str) -> Result<usize, FrameworkError> {
        let number = self.number(flag)?;
        number.ok_or_else(|| FRAMEWORK.unspecified(flag, "add the flag"))
    }
}

/// The number of values that the flag takes, or `None` if Megatron has no such flag.
pub(super) fn arity(flag: &str) -> Option<&'static str> {
    let mut lines = KNOWN.lines().filter_map(|line| line.split_once(' '));
    lines
        .find(|(known, _)| *known == flag)
        .map(|(_, arity)| arity)
}

/// Whether the value is a file, a folder or a name of a run: neither a strategy nor a model depends on it, and scripts
/// take it from their arguments.
fn is_place(flag: &str) -> bool {
    const PLACES: [&str; 13] = [
        "--save",
        "--load",
        "--data-path",
        "--data-cache-path",
        "--train-data-path",
        "--valid-data-path",
        "--test-data-path",
        "--vocab-file",
        "--merge-file",
        "--tokenizer-model",
        "--tensorboard-dir",
        "--pretrained-checkpoint",
        "--data-args-path",
    ];
    PLACES.contains(&flag) || flag.starts_with("--wandb-")
}

/// Whether a word is a flag. A single minus begins a negative number.
fn is_flag(word: &str) -> bool {
    word.starts_with("--")
}
