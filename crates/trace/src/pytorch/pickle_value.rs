//! Deserializing what a pickle holds, with a limit on depth and on work.
//!
//! The same `Deserialize` types read Flight Recorder dumps in JSON and in pickles. In a pickle, values may be
//! shared and may contain themselves, so neither the work nor the result is bounded by the number of values.
//! Dumps share only strings, stack frames and perhaps the names of groups. So larger lists and dictionaries are
//! read once, and every visit of a value and every copied byte of text is charged to a budget in proportion to
//! the size of the input.

use std::cell::{Cell, RefCell};

use serde::{
    Deserialize, Deserializer,
    de::{
        DeserializeSeed, Error as _, IntoDeserializer, MapAccess, SeqAccess, Visitor, value::Error,
    },
    forward_to_deserialize_any,
};

use super::pickle::{Node, Pickle, PickleError, Value};

/// The deepest nesting that is read. Dumps have six levels.
const MAX_DEPTH: u32 = 32;

/// The work that is allowed per byte of input. A reference to a shared stack frame takes two bytes and four
/// visits.
const WORK_PER_BYTE: u64 = 4;
/// The largest list or dictionary that may be shared. A stack frame has three entries.
const MAX_SHARED: usize = 4;
/// The work that is allowed for any input.
const FREE_WORK: u64 = 4096;

/// Reads a value of type `T` from a parsed pickle. It may borrow strings from the pickle.
pub(super) fn from_pickle<'de, T: Deserialize<'de>>(
    pickle: &'de Pickle<'de>,
) -> Result<T, PickleError> {
    let work = WORK_PER_BYTE.saturating_mul(pickle.num_bytes as u64);
    let budget = Cell::new(work.saturating_add(FREE_WORK));
    let is_read = RefCell::new(vec![false; pickle.num_nodes()]);
    let root = At {
        pickle,
        budget: &budget,
        is_read: &is_read,
        node: pickle.root,
        depth: 0,
    };
    T::deserialize(root).map_err(|error| PickleError::Content(error.to_string()))
}

/// A node, and how deep it is.
#[derive(Clone, Copy)]
struct At<'de, 'b> {
    pickle: &'de Pickle<'de>,
    budget: &'b Cell<u64>,
    /// Whether a node has been read.
    is_read: &'b RefCell<Vec<bool>>,
    node: Node,
    depth: u32,
}

impl<'de, 'b> At<'de, 'b> {
    fn charge(&self, work: usize) -> Result<(), Error> {
        let left = self.budget.get().checked_sub(work as u64);
        let left = left.ok_or_else(|| Error::custom("the pickle repeats its values too often"))?;
        self.budget.set(left);
        Ok(())
    }

    fn value(&self) -> Result<&'de Value<'de>, Error> {
        self.charge(1)?;
        if self.depth > MAX_DEPTH {
            return Err(Error::custom("the pickle is nested too deeply"));
        }
        let value = self.pickle.get(self.node);
        let may_be_shared = match value {
            Value::List(items) => items.len() <= MAX_SHARED,
            Value::Map(items) => items.len() <= MAX_SHARED,
            _ => true,
        };
        if self.was_read() && !may_be_shared {
            return Err(Error::custom(
                "the pickle repeats a large list or dictionary",
            ));
        }
        Ok(value)
    }

    /// Whether the node was read before. It is from now on.
    fn was_read(&self) -> bool {
        let mut is_read = self.is_read.borrow_mut();
        is_read
            .get_mut(self.node as usize)
            .is_some_and(|is_read| std::mem::replace(is_read, true))
    }

    fn part(&self, node: Node) -> At<'de, 'b> {
        let depth = self.depth + 1;
        At {
            node,
            depth,
            ..*self
        }
    }
}

impl<'de> Deserializer<'de> for At<'de, '_> {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.value()? {
            Value::None => visitor.visit_unit(),
            Value::Bool(value) => visitor.visit_bool(*value),
            Value::Int(value) => visitor.visit_i64(*value),
            Value::Float(value) => visitor.visit_f64(*value),
            Value::Text(value) => visitor.visit_borrowed_str(value),
            Value::List(items) => visitor.visit_seq(Items { items, at: self }),
            Value::Map(items) => visitor.visit_map(Entries {
                items,
                value: None,
                at: self,
            }),
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.pickle.get(self.node) {
            Value::None => visitor.visit_none(),
            _ => visitor.visit_some(self),
        }
    }

    /// Copies text, in contrast to `deserialize_str`.
    fn deserialize_string<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        if let Value::Text(text) = self.pickle.get(self.node) {
            self.charge(text.len())?;
        }
        self.deserialize_any(visitor)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, Error> {
        visitor.visit_newtype_struct(self)
    }

    /// Skips the value with all its parts.
    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_unit()
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str bytes byte_buf unit unit_struct seq
        tuple tuple_struct map struct enum identifier
    }
}

/// The rest of a list.
struct Items<'de, 'b> {
    items: &'de [Node],
    at: At<'de, 'b>,
}

impl<'de> SeqAccess<'de> for Items<'de, '_> {
    type Error = Error;

    fn next_element_seed<T: DeserializeSeed<'de>>(
        &mut self,
        seed: T,
    ) -> Result<Option<T::Value>, Error> {
        let Some((&item, rest)) = self.items.split_first() else {
            return Ok(None);
        };
        self.items = rest;
        seed.deserialize(self.at.part(item)).map(Some)
    }
}

/// The rest of a dictionary.
struct Entries<'de, 'b> {
    items: &'de [(Node, Node)],
    /// The value of the key that was read last.
    value: Option<Node>,
    at: At<'de, 'b>,
}

impl<'de> MapAccess<'de> for Entries<'de, '_> {
    type Error = Error;

    fn next_key_seed<T: DeserializeSeed<'de>>(
        &mut self,
        seed: T,
    ) -> Result<Option<T::Value>, Error> {
        let Some((&(key, value), rest)) = self.items.split_first() else {
            return Ok(None);
        };
        self.items = rest;
        self.value = Some(value);
        match self.at.pickle.get(key) {
            Value::Text(key) => seed.deserialize((*key).into_deserializer()).map(Some),
            _ => Err(Error::custom("a key of a dictionary is not text")),
        }
    }

    fn next_value_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<T::Value, Error> {
        let value = self.value.take();
        let value = value.ok_or_else(|| Error::custom("a dictionary has a key without a value"))?;
        seed.deserialize(self.at.part(value))
    }
}
