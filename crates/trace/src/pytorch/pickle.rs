//! A reader of pickles of plain data.
//!
//! A pickle is a program for a stack machine, and Python's machine can call any function. This one knows only
//! the opcodes that build dictionaries, lists, tuples, strings, numbers, booleans and `None`: those that
//! PyTorch's C++ code writes (protocol 2), and those that Python writes for such data (protocols 2 to 5).
//! Everything else is an error that names the opcode.
//!
//! Values are nodes of an arena and refer to each other by index. A pickle shares values through its memo, so
//! a few bytes can stand for an exponentially large tree, or for a cycle. The arena holds every value once and
//! its size is linear in that of the input; [`PickleValue`](super::pickle_value) limits what is read from it.

use super::opcode;

/// Why bytes are not a pickle of plain data.
#[derive(Debug, thiserror::Error)]
pub enum PickleError {
    /// The bytes do not start with the opcode `PROTO`.
    #[error("it does not start like a pickle of protocol 2 or later")]
    NoPickle,
    /// The pickle has an opcode that plain data does not need.
    #[error(
        "the pickle has the opcode {name} ({opcode:#04x}) at offset {offset}, which plain data never needs"
    )]
    Opcode {
        /// The name of the opcode.
        name: &'static str,
        /// The opcode.
        opcode: u8,
        /// Its position.
        offset: usize,
    },
    /// The operands of an opcode are missing, truncated or of the wrong type.
    #[error("the pickle is damaged at offset {offset}: {name} has {problem}")]
    Damaged {
        /// The name of the opcode.
        name: &'static str,
        /// Its position.
        offset: usize,
        /// What is wrong with its operands.
        problem: &'static str,
    },
    /// The pickle ends before the opcode `STOP`.
    #[error("the pickle ends early, after {offset} bytes")]
    Truncated {
        /// The number of bytes.
        offset: usize,
    },
    /// The content does not have the expected fields, or is too deep or too large.
    #[error("{0}")]
    Content(String),
}

/// The index of a node in the arena.
pub(super) type Node = u32;

/// The nodes that every arena starts with, as pickles use them often: one byte each.
const CONSTANTS: [Value<'static>; 3] = [Value::None, Value::Bool(false), Value::Bool(true)];

/// More containers than this are never unfinished at a time in a dump.
const MAX_MARKS: usize = 64;

/// A value whose parts are other nodes.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Value<'a> {
    None,
    Bool(bool),
    Int(i64),
    Float(f64),
    Text(&'a str),
    /// A list or a tuple.
    List(Vec<Node>),
    Map(Vec<(Node, Node)>),
}

/// A pickle, parsed.
#[derive(Debug)]
pub(super) struct Pickle<'a> {
    nodes: Vec<Value<'a>>,
    pub(super) root: Node,
    /// The size of the input, by which the cost of reading the values is limited.
    pub(super) num_bytes: usize,
}

impl<'a> Pickle<'a> {
    /// The number of nodes.
    pub(super) fn num_nodes(&self) -> usize {
        self.nodes.len()
    }

    /// The value of a node.
    pub(super) fn get(&self, node: Node) -> &Value<'a> {
        self.nodes.get(node as usize).unwrap_or(&Value::None)
    }
}

/// Whether a file with these bytes should be read as a pickle.
pub(crate) fn is_pickle(bytes: &[u8]) -> bool {
    matches!(bytes, [PROTO, 2..=5, ..])
}

/// Parses a pickle.
pub(super) fn parse(bytes: &[u8]) -> Result<Pickle<'_>, PickleError> {
    if !is_pickle(bytes) {
        return Err(PickleError::NoPickle);
    }
    let mut machine = Machine::new(bytes);
    let root = machine.run()?;
    Ok(Pickle {
        nodes: machine.nodes,
        root,
        num_bytes: bytes.len(),
    })
}

const PROTO: u8 = 0x80;

/// What an opcode's operands can be wrong with.
type Step<T = ()> = Result<T, &'static str>;

const SHORT_INPUT: &str = "too few bytes after it";
const SHORT_STACK: &str = "too few values before it";

/// The machine that runs the pickle.
struct Machine<'a> {
    bytes: &'a [u8],
    position: usize,
    nodes: Vec<Value<'a>>,
    stack: Vec<Node>,
    /// The heights of the stack at the opcodes `MARK` that are not used up.
    marks: Vec<usize>,
    memo: Memo,
}

impl<'a> Machine<'a> {
    fn new(bytes: &'a [u8]) -> Machine<'a> {
        Machine {
            bytes,
            position: 0,
            nodes: CONSTANTS.to_vec(),
            stack: Vec::new(),
            marks: Vec::new(),
            memo: Memo::default(),
        }
    }

    /// Runs until `STOP`, and returns the value on the stack.
    fn run(&mut self) -> Result<Node, PickleError> {
        loop {
            let offset = self.position;
            let Some(&opcode) = self.bytes.get(offset) else {
                return Err(PickleError::Truncated { offset });
            };
            self.position += 1;
            let name = opcode::name(opcode);
            let damaged = |problem| PickleError::Damaged {
                name,
                offset,
                problem,
            };
            if opcode == b'.' {
                return self.finish().map_err(damaged);
            }
            let is_known = self.step(opcode).map_err(damaged)?;
            if !is_known {
                return Err(PickleError::Opcode {
                    name,
                    opcode,
                    offset,
                });
            }
        }
    }

    /// The value that the pickle stands for.
    fn finish(&mut self) -> Step<Node> {
        if !self.marks.is_empty() {
            return Err("unfinished values before it");
        }
        self.pop()
    }

    /// Executes one opcode. False if plain data does not need it.
    fn step(&mut self, opcode: u8) -> Step<bool> {
        let is_known = self.push_scalar(opcode)?
            || self.push_text(opcode)?
            || self.build(opcode)?
            || self.memoize(opcode)?
            || self.control(opcode)?;
        Ok(is_known)
    }

    fn push_scalar(&mut self, opcode: u8) -> Step<bool> {
        let value = match opcode {
            b'N' => return self.push_constant(0),
            0x89 => return self.push_constant(1),
            0x88 => return self.push_constant(2),
            b'K' => Value::Int(self.unsigned(1)?.into()),
            b'M' => Value::Int(self.unsigned(2)?.into()),
            b'J' => Value::Int(i32::from_le_bytes(self.array()?).into()),
            0x8a => self.long()?,
            b'G' => Value::Float(f64::from_be_bytes(self.array()?)),
            _ => return Ok(false),
        };
        self.push(value)?;
        Ok(true)
    }

    fn push_constant(&mut self, node: Node) -> Step<bool> {
        self.stack.push(node);
        Ok(true)
    }

    fn push_text(&mut self, opcode: u8) -> Step<bool> {
        let length = match opcode {
            0x8c => u64::from(self.unsigned(1)?),
            b'X' => u64::from(self.unsigned(4)?),
            0x8d => u64::from_le_bytes(self.array()?),
            _ => return Ok(false),
        };
        let length = usize::try_from(length).map_err(|_| SHORT_INPUT)?;
        let text = std::str::from_utf8(self.take(length)?).map_err(|_| "text that is not UTF-8")?;
        self.push(Value::Text(text))?;
        Ok(true)
    }

    fn build(&mut self, opcode: u8) -> Step<bool> {
        match opcode {
            b']' | b')' => self.push(Value::List(Vec::new()))?,
            b'}' => self.push(Value::Map(Vec::new()))?,
            0x85..=0x87 => self.tuple(usize::from(opcode - 0x84))?,
            b't' | b'l' => {
                let items = self.above_mark()?;
                self.push(Value::List(items))?;
            }
            b'd' => {
                let items = pairs(self.above_mark()?)?;
                self.push(Value::Map(items))?;
            }
            b'a' => {
                let item = self.pop()?;
                self.top_list()?.push(item);
            }
            b'e' => {
                let items = self.above_mark()?;
                self.top_list()?.extend(items);
            }
            b's' => {
                let (value, key) = (self.pop()?, self.pop()?);
                self.top_map()?.push((key, value));
            }
            b'u' => {
                let items = pairs(self.above_mark()?)?;
                self.top_map()?.extend(items);
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn memoize(&mut self, opcode: u8) -> Step<bool> {
        match opcode {
            b'q' | b'r' | 0x94 => {
                let id = match opcode {
                    b'q' => self.unsigned(1)?,
                    b'r' => self.unsigned(4)?,
                    _ => self.memo.next()?,
                };
                let top = *self.stack.last().ok_or(SHORT_STACK)?;
                self.memo.put(id, top)?;
            }
            b'h' | b'j' => {
                let id = self.unsigned(if opcode == b'h' { 1 } else { 4 })?;
                let node = self.memo.get(id)?;
                self.stack.push(node);
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn control(&mut self, opcode: u8) -> Step<bool> {
        match opcode {
            PROTO => {
                self.take(1)?;
            }
            // The length of a frame helps a reader that buffers; all bytes are here already.
            0x95 => {
                self.take(8)?;
            }
            b'(' if self.marks.len() == MAX_MARKS => {
                return Err("too many unfinished values before it");
            }
            b'(' => self.marks.push(self.stack.len()),
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Every value of a dump takes two bytes or more. Bytes that make more of them would cost much memory.
    fn push(&mut self, value: Value<'a>) -> Step {
        let node = self.nodes.len();
        if node > self.bytes.len() / 2 + CONSTANTS.len() {
            return Err("more values before it than its size justifies");
        }
        self.stack
            .push(Node::try_from(node).map_err(|_| "too many values before it")?);
        self.nodes.push(value);
        Ok(())
    }

    /// Takes the top of the stack. Values below the last mark belong to an unfinished container.
    fn pop(&mut self) -> Step<Node> {
        let lowest = self.marks.last().copied().unwrap_or(0);
        if self.stack.len() <= lowest {
            return Err(SHORT_STACK);
        }
        self.stack.pop().ok_or(SHORT_STACK)
    }

    fn above_mark(&mut self) -> Step<Vec<Node>> {
        let mark = self.marks.pop().ok_or("no MARK before it")?;
        if mark > self.stack.len() {
            return Err(SHORT_STACK);
        }
        Ok(self.stack.drain(mark..).collect())
    }

    fn tuple(&mut self, length: usize) -> Step {
        let mut items = Vec::with_capacity(length);
        for _ in 0..length {
            items.push(self.pop()?);
        }
        items.reverse();
        self.push(Value::List(items))
    }

    fn top(&mut self) -> Step<&mut Value<'a>> {
        let top = *self.stack.last().ok_or(SHORT_STACK)?;
        self.nodes.get_mut(top as usize).ok_or(SHORT_STACK)
    }

    fn top_list(&mut self) -> Step<&mut Vec<Node>> {
        match self.top()? {
            Value::List(items) => Ok(items),
            _ => Err("no list before it"),
        }
    }

    fn top_map(&mut self) -> Step<&mut Vec<(Node, Node)>> {
        match self.top()? {
            Value::Map(items) => Ok(items),
            _ => Err("no dictionary before it"),
        }
    }

    fn take(&mut self, length: usize) -> Step<&'a [u8]> {
        let rest = self.bytes.get(self.position..).ok_or(SHORT_INPUT)?;
        let taken = rest.get(..length).ok_or(SHORT_INPUT)?;
        self.position += length;
        Ok(taken)
    }

    fn array<const LENGTH: usize>(&mut self) -> Step<[u8; LENGTH]> {
        self.take(LENGTH)?.try_into().map_err(|_| SHORT_INPUT)
    }

    /// A little-endian number of up to four bytes.
    fn unsigned(&mut self, length: usize) -> Step<u32> {
        let bytes = self.take(length)?;
        Ok(bytes
            .iter()
            .rev()
            .fold(0, |number, &byte| number << 8 | u32::from(byte)))
    }

    /// An integer in two's complement, of as many bytes as the next byte says.
    fn long(&mut self) -> Step<Value<'a>> {
        let length = self.unsigned(1)? as usize;
        let bytes = self.take(length)?;
        let is_negative = bytes.last().is_some_and(|byte| byte & 0x80 != 0);
        let fill = if is_negative { 0xff } else { 0 };
        let mut number = [fill; 8];
        let (low, high) = bytes.split_at(length.min(8));
        if high.iter().any(|&byte| byte != fill) {
            return Err("a number of more than 64 bits");
        }
        for (to, from) in number.iter_mut().zip(low) {
            *to = *from;
        }
        let number = i64::from_le_bytes(number);
        if (number < 0) != is_negative {
            return Err("a number of more than 64 bits");
        }
        Ok(Value::Int(number))
    }
}

/// Splits alternating keys and values.
fn pairs(items: Vec<Node>) -> Step<Vec<(Node, Node)>> {
    let (pairs, []) = items.as_chunks::<2>() else {
        return Err("a key without a value before it");
    };
    Ok(pairs.iter().map(|&[key, value]| (key, value)).collect())
}

/// The values that a pickle has numbered, to refer to them again.
///
/// Writers number them in ascending order, so a vector is enough, and no number in the input makes it larger
/// than the input.
#[derive(Default)]
struct Memo(Vec<Node>);

impl Memo {
    fn next(&self) -> Step<u32> {
        u32::try_from(self.0.len()).map_err(|_| "too many values in the memo")
    }

    fn put(&mut self, id: u32, node: Node) -> Step {
        let id = id as usize;
        if id == self.0.len() {
            self.0.push(node);
            return Ok(());
        }
        let entry = self.0.get_mut(id);
        *entry.ok_or("an index that leaves out others")? = node;
        Ok(())
    }

    fn get(&self, id: u32) -> Step<Node> {
        self.0
            .get(id as usize)
            .copied()
            .ok_or("an index that is not in the memo")
    }
}

#[cfg(test)]
mod tests;
