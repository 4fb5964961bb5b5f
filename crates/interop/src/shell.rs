//! Reads shell scripts without executing them: assignments, arrays, expansions of these, quotes, comments and
//! continued lines. What only a shell could know (commands, arithmetic, conditions, the environment) stays in the
//! words that contain it, with the reason why it is not readable.

use std::collections::BTreeMap;

use super::{Framework, FrameworkError};

/// The limit of expansions within expansions.
const MAX_NESTING: usize = 16;

/// The limit of what expansions produce. Arrays that contain themselves double in every line.
const MAX_PRODUCED: usize = 1 << 20;

/// A word of a command.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Word {
    /// The word; what is not readable is as it stands in the script.
    pub text: String,
    /// Why it is not readable.
    pub problem: Option<String>,
}

impl Word {
    fn plain(text: impl Into<String>) -> Word {
        Word {
            text: text.into(),
            problem: None,
        }
    }

    fn unreadable(text: impl Into<String>, problem: impl Into<String>) -> Word {
        Word {
            text: text.into(),
            problem: Some(problem.into()),
        }
    }

    fn append(&mut self, other: &Word) {
        self.text.push_str(&other.text);
        if self.problem.is_none() {
            self.problem.clone_from(&other.problem);
        }
    }
}

/// The words of the command that trains: the last one with flags, preferably one that starts Python.
pub(super) fn training_command(
    framework: Framework,
    text: &str,
) -> Result<Vec<Word>, FrameworkError> {
    let mut script = Script {
        framework,
        chars: text.chars().collect(),
        at: 0,
        variables: BTreeMap::new(),
        produced: 0,
        depth: 0,
        nesting: 0,
        is_conditional: false,
    };
    let mut commands: Vec<Command> = Vec::new();
    while script.at < script.chars.len() {
        let command = script.statement()?;
        let begins_with_flag = command.words.first().is_some_and(Word::is_flag);
        match commands.last_mut() {
            // A list of flags may have one per line.
            Some(last) if begins_with_flag => last.words.extend(command.words),
            _ if command.words.iter().any(Word::is_flag) => commands.push(command),
            _ => {}
        }
    }
    let starts_python = |command: &&Command| command.words.iter().any(Word::is_python);
    let chosen = commands.iter().rfind(starts_python).or(commands.last());
    match chosen {
        None => Ok(Vec::new()),
        Some(command) if command.is_inside_block => Err(framework.syntax(
            "the command is inside a condition, a loop or a function, which are not executed: write it alone",
        )),
        Some(command) => Ok(command.words.clone()),
    }
}

impl Word {
    fn is_flag(&self) -> bool {
        self.text.starts_with("--")
    }

    fn is_python(&self) -> bool {
        let name = self.text.rsplit('/').next().unwrap_or_default();
        matches!(name, "torchrun" | "python" | "python3") || name.ends_with(".py")
    }
}

#[derive(Debug)]
struct Command {
    words: Vec<Word>,
    is_inside_block: bool,
}

#[derive(Clone, Debug)]
enum Variable {
    Scalar(Word),
    Array(Vec<Word>),
}

/// Words that begin blocks, end blocks, or stand before a command.
const OPENING: [&str; 7] = ["if", "for", "while", "until", "case", "{", "function"];
const CLOSING: [&str; 4] = ["fi", "done", "esac", "}"];
const BEFORE_COMMAND: [&str; 10] = [
    "then", "else", "elif", "do", "export", "local", "readonly", "declare", "typeset", "exec",
];

struct Script {
    framework: Framework,
    chars: Vec<char>,
    at: usize,
    variables: BTreeMap<String, Variable>,
    produced: usize,
    /// The number of blocks around the statement.
    depth: usize,
    /// The number of expansions around the characters.
    nesting: usize,
    /// Whether the statement follows `&&` or `||`.
    is_conditional: bool,
}

impl Script {
    fn peek(&self) -> Option<char> {
        self.chars.get(self.at).copied()
    }

    fn peek_second(&self) -> Option<char> {
        self.chars.get(self.at + 1).copied()
    }

    fn count(&mut self, produced: usize) -> Result<(), FrameworkError> {
        self.produced = self.produced.saturating_add(produced + 1);
        if self.produced <= MAX_PRODUCED {
            return Ok(());
        }
        let limit = MAX_PRODUCED;
        Err(self.framework.syntax(format!(
            "its variables expand to more than {limit} characters"
        )))
    }

    /// Reads one statement: assignments change the variables, the words of a command are returned.
    fn statement(&mut self) -> Result<Command, FrameworkError> {
        let mut words: Vec<Word> = Vec::new();
        let mut is_inside_block = self.depth > 0;
        loop {
            self.skip_blanks();
            let Some(c) = self.peek() else { break };
            match c {
                '\n' | ';' => {
                    self.at += 1;
                    self.is_conditional = false;
                    break;
                }
                '#' => self.skip_line(),
                '&' | '|' => {
                    let is_double = self.peek_second() == Some(c);
                    self.at += if is_double { 2 } else { 1 };
                    if c == '&' && self.peek() == Some('>') {
                        continue;
                    }
                    self.is_conditional = is_double;
                    break;
                }
                '<' | '>' => self.redirection()?,
                '(' | ')' => {
                    self.at += 1;
                    let is_function = c == '(' && self.peek() == Some(')') && words.len() == 1;
                    if is_function {
                        self.at += 1;
                        self.depth += 1;
                        is_inside_block = true;
                    } else if c == ')' && self.depth > 0 {
                        // A pattern of `case`: what follows is a statement.
                        words.clear();
                    }
                }
                _ if words.is_empty() && self.assignment()? => {}
                _ => {
                    let word = self.words()?;
                    let name = word.first().map_or("", |word| word.text.as_str());
                    if words.is_empty() && BEFORE_COMMAND.contains(&name) {
                        continue;
                    }
                    if words.is_empty() && OPENING.contains(&name) {
                        self.depth += 1;
                        is_inside_block = true;
                    }
                    if words.is_empty() && CLOSING.contains(&name) {
                        self.depth = self.depth.saturating_sub(1);
                    }
                    if !self.is_descriptor(&word) {
                        words.extend(word);
                    }
                }
            }
        }
        if words.first().is_some_and(|word| word.text == "unset") {
            for word in &words {
                self.variables.remove(&word.text);
            }
        }
        Ok(Command {
            words,
            is_inside_block,
        })
    }

    /// Whether the word is the number before a redirection, as in `2>&1`.
    fn is_descriptor(&self, words: &[Word]) -> bool {
        let is_number = |text: &str| !text.is_empty() && text.chars().all(|c| c.is_ascii_digit());
        let is_redirected = self.peek().is_some_and(|c| matches!(c, '<' | '>'));
        is_redirected && matches!(words, [word] if is_number(&word.text))
    }

    /// Skips spaces and continued lines.
    fn skip_blanks(&mut self) {
        loop {
            match (self.peek(), self.peek_second()) {
                (Some('\\'), Some('\n')) => self.at += 2,
                (Some(c), _) if c.is_whitespace() && c != '\n' => self.at += 1,
                _ => return,
            }
        }
    }

    fn skip_line(&mut self) {
        while self.peek().is_some_and(|c| c != '\n') {
            self.at += 1;
        }
    }

    /// Skips `> file` and `2>&1`.
    fn redirection(&mut self) -> Result<(), FrameworkError> {
        if self.peek() == Some('<') && self.peek_second() == Some('<') {
            return Err(self
                .framework
                .syntax("<<: here-documents are not read: write the command alone"));
        }
        while self.peek().is_some_and(|c| matches!(c, '<' | '>' | '&')) {
            self.at += 1;
        }
        self.skip_blanks();
        self.words().map(drop)
    }

    /// Reads `NAME=value`, `NAME+=value` or `NAME=( ... )`, if one begins here.
    fn assignment(&mut self) -> Result<bool, FrameworkError> {
        let rest = &self.chars[self.at..];
        let length = rest.iter().take_while(|&&c| is_name(c)).count();
        let (is_appended, operator) = match (rest.get(length), rest.get(length + 1)) {
            (Some('='), _) => (false, 1),
            (Some('+'), Some('=')) => (true, 2),
            _ => return Ok(false),
        };
        if length == 0 || rest[0].is_ascii_digit() {
            return Ok(false);
        }
        let name: String = rest[..length].iter().collect();
        self.at += length + operator;
        let value = if self.peek() == Some('(') {
            self.at += 1;
            Variable::Array(self.array()?)
        } else {
            Variable::Scalar(self.scalar()?)
        };
        let value = if self.depth > 0 || self.is_conditional {
            let problem = format!("{name} is assigned under a condition, which is not evaluated");
            Variable::Scalar(Word::unreadable(format!("${name}"), problem))
        } else {
            value
        };
        let value = match (is_appended, self.variables.remove(&name), value) {
            (true, Some(Variable::Array(mut all)), Variable::Array(more)) => {
                all.extend(more);
                Variable::Array(all)
            }
            (true, Some(Variable::Scalar(mut all)), Variable::Scalar(more)) => {
                all.append(&more);
                Variable::Scalar(all)
            }
            (true, Some(_), _) => Variable::Scalar(Word::unreadable(
                format!("${name}"),
                format!("{name} is a text and an array: write one of them"),
            )),
            (_, _, value) => value,
        };
        self.variables.insert(name, value);
        Ok(true)
    }

    /// The elements of an array, after its parenthesis.
    fn array(&mut self) -> Result<Vec<Word>, FrameworkError> {
        let mut elements = Vec::new();
        loop {
            self.skip_blanks();
            match self.peek() {
                None => return Err(self.framework.syntax("( has no closing parenthesis")),
                Some(')') => {
                    self.at += 1;
                    return Ok(elements);
                }
                Some('\n') => self.at += 1,
                Some('#') => self.skip_line(),
                Some(c) if is_operator(c) => self.at += 1,
                Some(_) => elements.extend(self.words()?),
            }
        }
    }

    /// The value of an assignment, which is never split.
    fn scalar(&mut self) -> Result<Word, FrameworkError> {
        let mut value = Word::default();
        while let Some(part) = self.part()? {
            for (index, word) in part.words.iter().enumerate() {
                if index > 0 {
                    value.text.push(' ');
                }
                value.append(word);
            }
        }
        self.count(value.text.len())?;
        Ok(value)
    }

    /// The words that one word of the script expands to.
    fn words(&mut self) -> Result<Vec<Word>, FrameworkError> {
        let start = self.at;
        let mut words: Vec<Word> = Vec::new();
        let mut open: Option<Word> = None;
        while let Some(part) = self.part()? {
            for (index, word) in part.words.into_iter().enumerate() {
                if index > 0 {
                    words.extend(open.take());
                }
                open.get_or_insert_default().append(&word);
            }
        }
        words.extend(open);
        if self.at == start {
            // An operator that no statement knows; every round must move on.
            self.at += 1;
        }
        let length = words.iter().map(|word| word.text.len() + 1).sum();
        self.count(length)?;
        Ok(words)
    }

    /// The next part of a word: a quoted text, an expansion or plain characters. `None` at the end of the word.
    fn part(&mut self) -> Result<Option<Part>, FrameworkError> {
        let Some(c) = self.peek() else {
            return Ok(None);
        };
        Ok(match c {
            '\\' => {
                self.at += 1;
                let next = self.peek();
                self.at += usize::from(next.is_some());
                let text = next.filter(|&c| c != '\n').map(String::from);
                Some(Part::one(text.unwrap_or_default()))
            }
            '\'' => Some(Part::one(self.single_quoted()?)),
            '"' => Some(self.double_quoted()?),
            '$' | '`' => {
                let expansion = self.expansion()?;
                Some(expansion.split())
            }
            c if c.is_whitespace() || is_operator(c) => None,
            _ => {
                let start = self.at;
                while self
                    .peek()
                    .is_some_and(|c| !c.is_whitespace() && !is_operator(c) && !is_special(c))
                {
                    self.at += 1;
                }
                Some(Part::one(self.text(start)))
            }
        })
    }

    fn text(&self, start: usize) -> String {
        self.chars[start..self.at.min(self.chars.len())]
            .iter()
            .collect()
    }

    fn single_quoted(&mut self) -> Result<String, FrameworkError> {
        self.at += 1;
        let start = self.at;
        while let Some(c) = self.peek() {
            if c == '\'' {
                let text = self.text(start);
                self.at += 1;
                return Ok(text);
            }
            self.at += 1;
        }
        Err(self.framework.syntax("' has no closing quote"))
    }

    fn double_quoted(&mut self) -> Result<Part, FrameworkError> {
        self.at += 1;
        let mut words = vec![Word::default()];
        let mut is_empty_list = false;
        loop {
            let Some(c) = self.peek() else {
                return Err(self.framework.syntax("\" has no closing quote"));
            };
            match c {
                '"' => {
                    self.at += 1;
                    let is_nothing = is_empty_list && words == [Word::default()];
                    return Ok(Part {
                        words: if is_nothing { Vec::new() } else { words },
                    });
                }
                '\\' => {
                    self.at += 1;
                    let next = self.peek();
                    self.at += usize::from(next.is_some());
                    let text = match next {
                        Some('\n') | None => String::new(),
                        Some(c @ ('$' | '`' | '"' | '\\')) => c.to_string(),
                        Some(c) => format!("\\{c}"),
                    };
                    append(&mut words, vec![Word::plain(text)]);
                }
                '$' | '`' => {
                    let expansion = self.expansion()?;
                    is_empty_list |= expansion.words.is_empty();
                    append(&mut words, expansion.words);
                }
                c => {
                    self.at += 1;
                    append(&mut words, vec![Word::plain(c)]);
                }
            }
        }
    }

    /// An expansion that begins here with `$` or a backtick.
    fn expansion(&mut self) -> Result<Part, FrameworkError> {
        let start = self.at;
        let executed = "commands and arithmetic are not executed: write the value itself";
        if self.peek() == Some('`') {
            self.at += 1;
            while self.peek().is_some_and(|c| c != '`') {
                self.at += 1;
            }
            self.at = (self.at + 1).min(self.chars.len());
            return Ok(Part::unreadable(self.text(start), executed));
        }
        self.at += 1;
        match self.peek() {
            Some('(') => {
                self.skip_balanced('(', ')');
                Ok(Part::unreadable(self.text(start), executed))
            }
            Some('{') => {
                self.skip_balanced('{', '}');
                let source = self.text(start);
                self.braced(&source)
            }
            // The arguments of the script: there are none.
            Some('@' | '*') => {
                self.at += 1;
                Ok(Part { words: Vec::new() })
            }
            Some(c) if c.is_ascii_digit() || matches!(c, '#' | '?' | '!' | '$' | '-') => {
                self.at += 1;
                let source = self.text(start);
                let problem =
                    "arguments and states of a script are not known: write the value itself";
                Ok(Part::unreadable(source, problem))
            }
            Some(c) if is_name(c) => {
                while self.peek().is_some_and(is_name) {
                    self.at += 1;
                }
                let source = self.text(start);
                Ok(self.value(&source[1..], &source, false))
            }
            _ => Ok(Part::one("$".to_owned())),
        }
    }

    /// Moves behind the parenthesis that closes the one here, or to the end.
    fn skip_balanced(&mut self, opening: char, closing: char) {
        let mut depth = 0usize;
        while let Some(c) = self.peek() {
            self.at += 1;
            if c == opening {
                depth += 1;
            } else if c == closing {
                depth -= 1;
                if depth == 0 {
                    return;
                }
            }
        }
    }

    /// `${NAME}`, `${NAME[@]}` and `${NAME:-default}`.
    fn braced(&mut self, source: &str) -> Result<Part, FrameworkError> {
        let inner = source
            .strip_prefix("${")
            .and_then(|rest| rest.strip_suffix('}'))
            .unwrap_or_default();
        let length = inner.chars().take_while(|&c| is_name(c)).count();
        let (name, operation) = inner.split_at(length);
        let default = ["=", "-"].iter().find_map(|operator| {
            operation
                .strip_prefix(':')
                .unwrap_or(operation)
                .strip_prefix(operator)
        });
        Ok(match (name, operation, default) {
            ("", ..) => Part::unreadable(source, "this expansion is not read: write the value"),
            (name, "", _) => self.value(name, source, false),
            (name, "[@]" | "[*]", _) => self.value(name, source, true),
            (name, _, Some(default)) => match self.variables.get(name) {
                Some(_) => self.value(name, source, false),
                None => self.default(default)?,
            },
            _ => Part::unreadable(source, "this expansion is not read: write the value"),
        })
    }

    /// The default of an expansion, which may contain others.
    fn default(&mut self, default: &str) -> Result<Part, FrameworkError> {
        if self.nesting >= MAX_NESTING {
            return Err(self.framework.syntax("${...} is nested too deeply"));
        }
        self.count(default.len())?;
        let outer = std::mem::replace(&mut self.chars, default.chars().collect());
        let position = std::mem::take(&mut self.at);
        self.nesting += 1;
        let words = self.all_parts();
        self.nesting -= 1;
        self.chars = outer;
        self.at = position;
        Ok(Part { words: words? })
    }

    /// The parts of the whole text, with its spaces.
    fn all_parts(&mut self) -> Result<Vec<Word>, FrameworkError> {
        let mut words = vec![Word::default()];
        while let Some(c) = self.peek() {
            match self.part()? {
                Some(part) => append(&mut words, part.words),
                None => {
                    self.at += 1;
                    append(&mut words, vec![Word::plain(c)]);
                }
            }
        }
        Ok(words)
    }

    /// The value of a variable; of an array its first element, or all of them.
    fn value(&self, name: &str, source: &str, is_all: bool) -> Part {
        match self.variables.get(name) {
            Some(Variable::Scalar(word)) => Part {
                words: vec![word.clone()],
            },
            Some(Variable::Array(words)) if is_all => Part {
                words: words.clone(),
            },
            Some(Variable::Array(words)) => Part {
                words: words.iter().take(1).cloned().collect(),
            },
            None => Part::unreadable(
                source,
                format!("{name} is not assigned in the script: write its value"),
            ),
        }
    }
}

/// What a part of a word expands to: usually one word, none or several for lists.
struct Part {
    words: Vec<Word>,
}

impl Part {
    fn one(text: String) -> Part {
        Part {
            words: vec![Word::plain(text)],
        }
    }

    fn unreadable(text: impl Into<String>, problem: impl Into<String>) -> Part {
        Part {
            words: vec![Word::unreadable(text, problem)],
        }
    }

    /// Splits readable words at spaces, as a shell does without quotes.
    fn split(self) -> Part {
        let split = |word: Word| match word.problem {
            Some(_) => vec![word],
            None => word.text.split_whitespace().map(Word::plain).collect(),
        };
        Part {
            words: self.words.into_iter().flat_map(split).collect(),
        }
    }
}

/// Appends the first of `more` to the last word, and the others as words of their own.
fn append(words: &mut Vec<Word>, more: Vec<Word>) {
    for (index, word) in more.into_iter().enumerate() {
        match words.last_mut() {
            Some(last) if index == 0 => last.append(&word),
            _ => words.push(word),
        }
    }
}

fn is_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

/// Characters that end a word.
fn is_operator(c: char) -> bool {
    matches!(c, ';' | '&' | '|' | '<' | '>' | '(' | ')')
}

/// Characters that begin a quote or an expansion.
fn is_special(c: char) -> bool {
    matches!(c, '\'' | '"' | '$' | '`' | '\\')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{prop_assert, proptest};

    use super::*;

    fn words(text: &str) -> Vec<String> {
        let words = training_command(Framework::Megatron, text).unwrap();
        words
            .into_iter()
            .map(|word| match word.problem {
                None => word.text,
                Some(_) => format!("?{}", word.text),
            })
            .collect()
    }

    #[test]
    fn variables_and_arrays_are_expanded() {
        let script = r#"#!/bin/bash
# Runs a model.
set -euo pipefail
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS=8; NODES=${NODES:-4}
TP=${TP:-$GPUS}
NAME='a b'
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS   # per node
    --nnodes "$NODES"
)
OLD="--num-layers 24 \
     --hidden-size 1024"
ARGS=(--name "$NAME" --save "${NAME}/x$TP")
ARGS+=(--bf16)
mkdir -p logs
torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_gpt.py \
    ${ARGS[@]} $OLD \
    "$@" 2>&1 | tee log.txt
"#;
        let expected = "torchrun|--nproc_per_node|8|--nnodes|4|pretrain_gpt.py|--name|a|b|--save|a|b/x8|--bf16|\
                        --num-layers|24|--hidden-size|1024";
        assert_eq!(words(script).join("|"), expected);
    }

    #[test]
    fn quotes_keep_words_together() {
        let script = "A=('x y' z)\npython t.py --a \"${A[@]}\" --b \"-$A-\" --c 'it'\\''s' --d \"\" --e a\\ b";
        assert_eq!(
            words(script),
            [
                "python", "t.py", "--a", "x y", "z", "--b", "-x y-", "--c", "it's", "--d", "",
                "--e", "a b"
            ]
        );
    }

    #[test]
    fn what_is_not_readable_is_named_and_never_executed() {
        let script = "N=$(nproc)\nW=$((2*$N))\n[ -z \"$X\" ] && X=3\nY=0\ncase $M in\n 8b) Y=1;;\nesac\n\
            torchrun --a $N --b \"$W\" --c `date` --d $X --e $Y --f $Z --g $1 --h ${Z/a/b} x.py";
        assert_eq!(
            words(script),
            [
                "torchrun",
                "--a",
                "?$(nproc)",
                "--b",
                "?$((2*$N))",
                "--c",
                "?`date`",
                "--d",
                "?$X",
                "--e",
                "?$Y",
                "--f",
                "?$Z",
                "--g",
                "?$1",
                "--h",
                "?${Z/a/b}",
                "x.py"
            ]
        );
        let found = training_command(Framework::Megatron, "torchrun --f $Z").unwrap();
        assert!(
            found[2]
                .problem
                .as_ref()
                .unwrap()
                .contains("Z is not assigned")
        );
    }

    #[test]
    fn invalid_scripts_are_rejected() {
        for (script, reason) in [
            ("torchrun --a 'x", "closing quote"),
            ("torchrun --a \"x", "closing quote"),
            ("A=(x", "closing parenthesis"),
            ("cat <<EOF\n--a\nEOF", "here-documents"),
            ("if x; then\n torchrun --a 1\nfi", "inside a condition"),
            ("f() {\n torchrun --a 1\n}\nf", "inside a condition"),
        ] {
            let error = training_command(Framework::Megatron, script).unwrap_err();
            assert!(error.to_string().contains(reason), "{script}: {error}");
        }
    }

    #[test]
    fn expansions_are_bounded() {
        let doubled = "A=(\"${A[@]}\" \"${A[@]}\" xxxxxxxx)\n".repeat(64);
        let error =
            training_command(Framework::Megatron, &format!("A=(x)\n{doubled}")).unwrap_err();
        assert!(error.to_string().contains("expand to more"), "{error}");
        let nested = format!("torchrun --a {}x{}", "${A:-".repeat(2000), "}".repeat(2000));
        let error = training_command(Framework::Megatron, &nested).unwrap_err();
        assert!(error.to_string().contains("nested"), "{error}");
    }

    proptest! {
        #[test]
        fn hostile_scripts_never_panic(text in "[A-C=(){}$:\\-\"'`\\\\;&|<>#@\\[\\] \\n+x1]{0,120}") {
            let _ = training_command(Framework::Megatron, &text);
        }

        #[test]
        fn plain_words_are_kept(values in proptest::collection::vec("[a-z0-9./_]{1,8}", 1..6)) {
            let script = format!("A=({})\npython x.py --a \"${{A[@]}}\"", values.join(" "));
            prop_assert!(words(&script).ends_with(&values));
        }
    }
}
