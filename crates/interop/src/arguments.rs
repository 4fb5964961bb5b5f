//! Parses launch command lines: shell words, torchrun's flags, and the program's own flags.

use super::{Framework, FrameworkError};

/// A parsed command line.
#[derive(Debug, Default, PartialEq)]
pub(super) struct CommandLine {
    /// The number of ranks that torchrun starts, if its flags determine it.
    pub world: Option<usize>,
    /// The arguments after the program's name.
    pub arguments: Vec<String>,
}

impl CommandLine {
    /// Parses a shell command. Without `torchrun`, all words after the program's name are the program's arguments;
    /// without a program's name, all words are.
    pub fn parse(framework: Framework, text: &str) -> Result<CommandLine, FrameworkError> {
        let mut words = shell_words(framework, text)?.into_iter().peekable();
        while words.next_if(|word| is_assignment(word)).is_some() {}
        let mut world = None;
        if words.next_if(|word| is_program(word, "torchrun")).is_some() {
            world = parse_torchrun(framework, &mut words)?;
        } else {
            words.next_if(|word| is_program(word, "python") || is_program(word, "python3"));
        }
        if words.next_if(|word| word == "-m").is_some() {
            words.next();
        } else {
            words.next_if(|word| !word.starts_with('-') && !word.contains(':'));
        }
        Ok(CommandLine {
            world,
            arguments: words.collect(),
        })
    }
}

/// Consumes torchrun's own flags, up to the program, and returns the number of ranks that they start.
fn parse_torchrun(
    framework: Framework,
    words: &mut std::iter::Peekable<std::vec::IntoIter<String>>,
) -> Result<Option<usize>, FrameworkError> {
    let (mut per_node, mut nodes) = (None, Some(1));
    while let Some(word) = words.next_if(|word| word.starts_with("--")) {
        let (flag, inline) = match word.split_once('=') {
            Some((flag, value)) => (flag.replace('_', "-"), Some(value.to_owned())),
            None => (word.replace('_', "-"), None),
        };
        if flag == "--standalone" || flag == "--no-python" {
            continue;
        }
        let value = inline.or_else(|| words.next()).unwrap_or_default();
        match flag.as_str() {
            "--nproc-per-node" => per_node = Some(count(&flag, &value)?),
            // A range of nodes is an elastic job, whose world size is not fixed.
            "--nnodes" if value.contains(':') => nodes = None,
            "--nnodes" => nodes = Some(count(&flag, &value)?),
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

fn is_assignment(word: &str) -> bool {
    let name = word.split_once('=').map(|(name, _)| name);
    name.is_some_and(|name| {
        !name.is_empty()
            && name
                .chars()
                .all(|c| c.is_ascii_uppercase() || c == '_' || c.is_ascii_digit())
    })
}

fn is_program(word: &str, name: &str) -> bool {
    word.rsplit('/').next() == Some(name)
}

/// Splits words as a shell does. Expansions and pipes are rejected, because no shell runs here.
fn shell_words(framework: Framework, text: &str) -> Result<Vec<String>, FrameworkError> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut quote: Option<char> = None;
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        match (c, quote) {
            ('$' | '`', None | Some('"')) => {
                return Err(framework.syntax(format!(
                    "{c} starts a shell expansion: write the value itself"
                )));
            }
            ('\\', None | Some('"')) => match chars.next() {
                Some('\n') | None => {}
                Some(next) => word.get_or_insert_default().push(next),
            },
            (c, Some(open)) if c == open => quote = None,
            ('"' | '\'', None) => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            ('#', None) if word.is_none() => while chars.next_if(|&c| c != '\n').is_some() {},
            (c, None) if c.is_whitespace() => words.extend(word.take()),
            (';' | '&' | '|' | '<' | '>', None) => {
                return Err(framework.syntax(format!("{c}: only one command is accepted")));
            }
            (c, _) => word.get_or_insert_default().push(c),
        }
    }
    if let Some(open) = quote {
        return Err(framework.syntax(format!("{open} has no closing quote")));
    }
    words.extend(word);
    Ok(words)
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
        assert_eq!(line.arguments, ["--x", "a b", "cd"]);
        let line = CommandLine::parse(FRAMEWORK, "--x 1").unwrap();
        assert_eq!((line.world, line.arguments.len()), (None, 2));
        let line = CommandLine::parse(
            FRAMEWORK,
            "torchrun --nnodes 1:4 --nproc-per-node 8 -m a.b --x",
        );
        assert_eq!(line.unwrap().world, None);
    }

    #[test]
    fn shell_expansions_are_rejected() {
        for text in ["--x $Y", "--x \"${Y}\"", "--x `y`", "--x 'y", "a | b"] {
            assert!(CommandLine::parse(FRAMEWORK, text).is_err(), "{text}");
        }
    }

    #[test]
    fn nodes_have_eight_ranks_if_they_divide() {
        assert_eq!(torchrun(64), "torchrun --nproc-per-node 8 --nnodes 8");
        assert_eq!(torchrun(6), "torchrun --nproc-per-node 6 --nnodes 1");
        assert_eq!(torchrun(12), "torchrun --nproc-per-node 6 --nnodes 2");
    }
}
