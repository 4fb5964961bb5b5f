//! Parses launch command lines: torchrun's flags, and the program's own flags.

use std::iter::Peekable;
use std::vec::IntoIter;

use super::shell::{Word, training_command};
use super::{Framework, FrameworkError};

/// A parsed command line.
#[derive(Debug, Default, PartialEq)]
pub(super) struct CommandLine {
    /// The number of ranks that torchrun starts, if its flags determine it.
    pub world: Option<usize>,
    /// The arguments after the program's name.
    pub arguments: Vec<Word>,
}

impl CommandLine {
    /// Parses a command line, or a script with one. Without `torchrun`, all words after the program's name are the
    /// program's arguments; without a program's name, all words are.
    pub fn parse(framework: Framework, text: &str) -> Result<CommandLine, FrameworkError> {
        let words = training_command(framework, text)?;
        // Launchers of schedulers stand before Python.
        let start = words.iter().position(|word| {
            ["torchrun", "python", "python3"]
                .iter()
                .any(|name| is_program(&word.text, name))
        });
        let rest = words.into_iter().skip(start.unwrap_or(0));
        let mut words = rest.collect::<Vec<_>>().into_iter().peekable();
        let mut world = None;
        if starts_torchrun(&mut words) {
            world = parse_torchrun(framework, &mut words)?;
        }
        if words.next_if(|word| word.text == "-m").is_some() {
            words.next();
        } else {
            words.next_if(|word| {
                let is_readable = word.problem.is_none();
                is_readable && !word.text.starts_with('-') && !word.text.contains(':')
            });
        }
        Ok(CommandLine {
            world,
            arguments: words.collect(),
        })
    }

    /// The arguments as text. Fails if one is not readable.
    pub fn readable(self, framework: Framework) -> Result<Vec<String>, FrameworkError> {
        let arguments = self.arguments.into_iter();
        arguments.map(|word| readable(framework, word)).collect()
    }
}

/// The text of a word. Fails if it is not readable.
pub(super) fn readable(framework: Framework, word: Word) -> Result<String, FrameworkError> {
    match word.problem {
        None => Ok(word.text),
        Some(problem) => {
            let text: String = word.text.chars().take(80).collect();
            Err(framework.syntax(format!("{text}: {problem}")))
        }
    }
}

/// Consumes `torchrun`, `python -m torch.distributed.run`, or `python`. Returns whether it is torchrun.
fn starts_torchrun(words: &mut Peekable<IntoIter<Word>>) -> bool {
    if words
        .next_if(|word| is_program(&word.text, "torchrun"))
        .is_some()
    {
        return true;
    }
    words.next_if(|word| is_program(&word.text, "python") || is_program(&word.text, "python3"));
    let mut ahead = words.clone();
    let is_module = ahead.next().is_some_and(|word| word.text == "-m");
    let is_torchrun = ahead
        .next()
        .is_some_and(|word| matches!(word.text.as_str(), TORCH_RUN | TORCH_LAUNCH));
    if is_module && is_torchrun {
        words.next();
        words.next();
    }
    is_module && is_torchrun
}

const TORCH_RUN: &str = "torch.distributed.run";
const TORCH_LAUNCH: &str = "torch.distributed.launch";

/// Consumes torchrun's own flags, up to the program, and returns the number of ranks that they start, if it is readable.
fn parse_torchrun(
    framework: Framework,
    words: &mut Peekable<IntoIter<Word>>,
) -> Result<Option<usize>, FrameworkError> {
    let (mut per_node, mut nodes) = (None, Some(1));
    while let Some(word) = words.next_if(|word| word.text.starts_with("--")) {
        let (flag, inline) = match word.text.split_once('=') {
            Some((flag, value)) => {
                let value = Word {
                    text: value.to_owned(),
                    problem: word.problem.clone(),
                };
                (flag.replace('_', "-"), Some(value))
            }
            None => (word.text.replace('_', "-"), None),
        };
        if flag == "--standalone" || flag == "--no-python" {
            continue;
        }
        let value = inline.or_else(|| words.next()).unwrap_or_default();
        let is_readable = value.problem.is_none();
        match flag.as_str() {
            "--nproc-per-node" if is_readable => per_node = Some(count(&flag, &value.text)?),
            "--nproc-per-node" => per_node = None,
            // A range of nodes is an elastic job, whose world size is not fixed.
            "--nnodes" if !is_readable || value.text.contains(':') => nodes = None,
            "--nnodes" => nodes = Some(count(&flag, &value.text)?),
            _ => {}
        }
    }
    let product = per_node.zip(nodes).map(|(a, b)| (a, b, a.checked_mul(b)));
    match product {
        Some((a, b, None)) => {
            Err(framework.syntax(format!("the number of ranks, {a} x {b}, is too large")))
        }
        Some((_, _, world)) => Ok(world),
        None => Ok(None),
    }
}

/// Parses a whole number.
pub(super) fn count(flag: &str, value: &str) -> Result<usize, FrameworkError> {
    value.parse().map_err(|_| FrameworkError::Value {
        key: flag.to_owned(),
        value: value.chars().take(80).collect(),
        expected: "a whole number",
    })
}

/// `torchrun` with its flags for `world` ranks: eight per node, or the largest smaller number that divides evenly.
pub(super) fn torchrun(world: usize) -> String {
    let per_node = (1..=world.min(8)).rev().find(|&n| world.is_multiple_of(n));
    let per_node = per_node.unwrap_or(1);
    format!(
        "torchrun --nproc-per-node {per_node} --nnodes {}",
        world / per_node
    )
}

fn is_program(word: &str, name: &str) -> bool {
    word.rsplit('/').next() == Some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FRAMEWORK: Framework = Framework::Megatron;

    #[test]
    fn a_launch_line_gives_the_ranks_and_the_programs_arguments() {
        let text = "# how\nA_B=1 torchrun --nproc_per_node=8 --nnodes 4 --tee 3 \\\n pretrain_gpt.py \
                    --x 'a b' \"c\"d # end";
        let line = CommandLine::parse(FRAMEWORK, text).unwrap();
        assert_eq!(line.world, Some(32));
        assert_eq!(line.readable(FRAMEWORK).unwrap(), ["--x", "a b", "cd"]);
        let line = CommandLine::parse(FRAMEWORK, "--x 1").unwrap();
        assert_eq!((line.world, line.arguments.len()), (None, 2));
        let line = CommandLine::parse(
            FRAMEWORK,
            "torchrun --nnodes 1:4 --nproc-per-node 8 -m a.b --x",
        );
        assert_eq!(line.unwrap().world, None);
    }

    #[test]
    fn what_is_not_readable_is_rejected_where_it_matters() {
        for text in ["--x $Y", "--x \"${Y}\"", "--x `y`"] {
            let line = CommandLine::parse(FRAMEWORK, text).unwrap();
            assert!(line.readable(FRAMEWORK).is_err(), "{text}");
        }
        assert!(CommandLine::parse(FRAMEWORK, "--x 'y").is_err());
        let text = "srun -n 8 python -m torch.distributed.launch --nproc_per_node=8 --nnodes $N x.py --y 1";
        let line = CommandLine::parse(FRAMEWORK, text).unwrap();
        assert_eq!(line.world, None);
        assert_eq!(line.readable(FRAMEWORK).unwrap(), ["--y", "1"]);
    }

    #[test]
    fn nodes_have_eight_ranks_if_they_divide() {
        assert_eq!(torchrun(64), "torchrun --nproc-per-node 8 --nnodes 8");
        assert_eq!(torchrun(6), "torchrun --nproc-per-node 6 --nnodes 1");
        assert_eq!(torchrun(12), "torchrun --nproc-per-node 6 --nnodes 2");
    }
}
