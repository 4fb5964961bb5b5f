//! The schema of a config, derived from its types.
//!
//! Suggestions and overrides need every key and its type. Instead of maintaining a list, we deserialize a [`Config`] from
//! a source without data that records the requests: for a struct it offers every field, for a number it records that a
//! number belongs at this path. So the schema cannot drift from the structs.

use std::sync::LazyLock;

use serde::de::value::{Error, MapDeserializer, SeqDeserializer};
use serde::de::{
    DeserializeSeed, Deserializer, Error as _, IntoDeserializer, MapAccess, SeqAccess, Visitor,
};
use serde::{Deserialize, forward_to_deserialize_any};
use toml::Value;

use crate::Config;
use crate::choice::OPEN;
use crate::suggest::nearest;

/// The type of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Bool,
    /// An integer that cannot be negative.
    Count,
    Integer,
    Float,
    Text,
    OneOf(&'static [&'static str]),
    /// One of these, or a name that a program registers.
    Open(&'static [&'static str]),
    /// Anything, as in the sections of registered components.
    Any,
}

impl Kind {
    /// Whether a value has this type. Integers of TOML are valid floats.
    pub fn accepts(self, value: &Value) -> bool {
        match (self, value) {
            (Kind::Bool, Value::Boolean(_)) => true,
            (Kind::Count, Value::Integer(number)) => *number >= 0,
            (Kind::Integer, Value::Integer(_)) => true,
            (Kind::Float, Value::Integer(_)) => true,
            // No setting means anything as NaN, and a config that holds one is not equal to itself.
            (Kind::Float, Value::Float(number)) => !number.is_nan(),
            (Kind::Text, Value::String(_)) => true,
            (Kind::Any, _) => true,
            (Kind::OneOf(choices) | Kind::Open(choices), Value::String(text)) => {
                choices.contains(&text.as_str())
            }
            _ => false,
        }
    }

    /// Parses a value of the command line; `None` if it is not of this type. Choices are not checked.
    pub fn read(self, text: &str) -> Option<Value> {
        let value = match self {
            Kind::Bool => Value::Boolean(text.parse().ok()?),
            Kind::Count | Kind::Integer => Value::Integer(text.replace('_', "").parse().ok()?),
            Kind::Float => Value::Float(text.replace('_', "").parse().ok()?),
            Kind::Text | Kind::OneOf(_) | Kind::Open(_) => Value::String(text.to_owned()),
            // A value of TOML; text needs no quotes.
            Kind::Any => format!("value = {text}")
                .parse::<toml::Table>()
                .ok()
                .and_then(|mut table| table.remove("value"))
                .unwrap_or_else(|| Value::String(text.to_owned())),
        };
        Some(value)
    }

    /// Describes the type in an error message, with registered names; `given` selects the nearest choice.
    pub fn describe(self, given: &str, registered: &[&str]) -> String {
        match self {
            Kind::Bool => "true or false".into(),
            Kind::Count => "a non-negative integer".into(),
            Kind::Integer => "an integer".into(),
            Kind::Float => "a number".into(),
            Kind::Text => "a string".into(),
            Kind::Any => "a value".into(),
            Kind::OneOf(choices) | Kind::Open(choices) => {
                let choices = || choices.iter().chain(registered).copied();
                let quoted: Vec<_> = choices().map(|c| format!("{c:?}")).collect();
                let list = format!("one of {}", quoted.join(", "));
                match nearest(given, choices()) {
                    Some(choice) => format!("{list} (did you mean {choice:?}?)"),
                    None => list,
                }
            }
        }
    }
}

/// Every key with its type, in the order of the structs.
#[derive(Debug, Default)]
pub struct Schema {
    keys: Vec<(String, Kind)>,
}

impl Schema {
    /// The schema of [`Config`].
    pub fn get() -> &'static Schema {
        static SCHEMA: LazyLock<Schema> = LazyLock::new(|| Schema::of::<Config>("").0);
        &SCHEMA
    }

    /// Whether a table of that name contains keys.
    pub fn has_below(&self, path: &str) -> bool {
        let is_below = |key: &str| {
            key.strip_prefix(path)
                .is_some_and(|rest| rest.starts_with('.'))
        };
        self.keys.iter().any(|(key, _)| is_below(key))
    }

    /// The type of a key such as `training.steps`.
    pub fn kind(&self, key: &str) -> Option<Kind> {
        let found = self.keys.iter().find(|(known, _)| known == key);
        found.map(|(_, kind)| *kind)
    }

    /// All keys with their types.
    pub fn entries(&self) -> impl Iterator<Item = (&str, Kind)> {
        self.keys.iter().map(|(key, kind)| (key.as_str(), *kind))
    }

    /// All keys with their sections.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.keys.iter().map(|(key, _)| key.as_str())
    }

    /// The names of all sections.
    pub fn sections(&self) -> impl Iterator<Item = &str> {
        let mut last = "";
        self.keys()
            .filter_map(|key| key.split_once('.'))
            .map(|(section, _)| section)
            .filter(move |section| std::mem::replace(&mut last, section) != *section)
    }

    /// The schema of a type whose keys are below `path`, as far as its types are known.
    pub fn of<T: for<'de> Deserialize<'de>>(path: &str) -> (Schema, Result<(), Error>) {
        let mut schema = Schema::default();
        let outcome = T::deserialize(Probe {
            path: path.to_owned(),
            schema: &mut schema,
        });
        (schema, outcome.map(drop))
    }
}

/// A deserializer without data that records the type requested at each path.
struct Probe<'a> {
    path: String,
    schema: &'a mut Schema,
}

impl Probe<'_> {
    fn note(self, kind: Kind) {
        self.schema.keys.push((self.path, kind));
    }
}

macro_rules! note {
    ($($method:ident: $kind:expr => $visit:ident($value:expr);)*) => {$(
        fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
            self.note($kind);
            visitor.$visit($value)
        }
    )*};
}

impl<'de> Deserializer<'de> for Probe<'_> {
    type Error = Error;

    note! {
        deserialize_bool: Kind::Bool => visit_bool(false);
        deserialize_u64: Kind::Count => visit_u64(1);
        deserialize_u8: Kind::Count => visit_u64(1);
        deserialize_u16: Kind::Count => visit_u64(1);
        deserialize_u32: Kind::Count => visit_u64(1);
        deserialize_i8: Kind::Integer => visit_i64(1);
        deserialize_i16: Kind::Integer => visit_i64(1);
        deserialize_i32: Kind::Integer => visit_i64(1);
        deserialize_i64: Kind::Integer => visit_i64(1);
        deserialize_f32: Kind::Float => visit_f64(1.0);
        deserialize_f64: Kind::Float => visit_f64(1.0);
        deserialize_string: Kind::Text => visit_str("");
    }

    /// A list or a map, of which nothing is known.
    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        self.note(Kind::Any);
        visitor.visit_seq(SeqDeserializer::new(std::iter::empty::<()>()))
    }

    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        self.note(Kind::Any);
        visitor.visit_map(MapDeserializer::new(std::iter::empty::<((), ())>()))
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        visitor: V,
    ) -> Result<V::Value, Error> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_tuple<V: Visitor<'de>>(self, len: usize, visitor: V) -> Result<V::Value, Error> {
        self.note(Kind::Any);
        visitor.visit_seq(Elements { len })
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_some(self)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        self.note(if name == OPEN {
            Kind::Open(variants)
        } else {
            Kind::OneOf(variants)
        });
        let first = variants.first().copied().unwrap_or_default();
        visitor.visit_enum(first.into_deserializer())
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        visitor.visit_map(Fields {
            fields,
            path: self.path,
            schema: self.schema,
        })
    }

    fn deserialize_any<V: Visitor<'de>>(self, _visitor: V) -> Result<V::Value, Error> {
        Err(Error::custom(format!(
            "{}: a type that config keys do not have",
            self.path
        )))
    }

    forward_to_deserialize_any! {
        i128 u128 char str bytes byte_buf unit unit_struct
        tuple_struct identifier ignored_any
    }
}

/// The elements of a tuple, which are not recorded.
struct Elements {
    len: usize,
}

impl<'de> SeqAccess<'de> for Elements {
    type Error = Error;

    fn next_element_seed<T: DeserializeSeed<'de>>(
        &mut self,
        seed: T,
    ) -> Result<Option<T::Value>, Error> {
        if self.len == 0 {
            return Ok(None);
        }
        self.len -= 1;
        let schema = &mut Schema::default();
        let path = String::new();
        seed.deserialize(Probe { path, schema }).map(Some)
    }
}

/// Offers every field of a struct and records each.
struct Fields<'a> {
    fields: &'static [&'static str],
    path: String,
    schema: &'a mut Schema,
}

impl<'de> MapAccess<'de> for Fields<'_> {
    type Error = Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, Error> {
        match self.fields.first() {
            Some(&field) => seed.deserialize(field.into_deserializer()).map(Some),
            None => Ok(None),
        }
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, Error> {
        let Some((field, rest)) = self.fields.split_first() else {
            return Err(Error::custom("a value without a key"));
        };
        self.fields = rest;
        let path = match self.path.as_str() {
            "" => (*field).to_owned(),
            path => format!("{path}.{field}"),
        };
        seed.deserialize(Probe {
            path,
            schema: self.schema,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_schema_contains_every_key() {
        let (_, outcome) = Schema::of::<Config>("");
        outcome.unwrap();
    }

    #[test]
    fn finds_kinds_of_plain_optional_and_enum_keys() {
        let schema = Schema::get();
        assert_eq!(schema.kind("training.steps"), Some(Kind::Count));
        assert_eq!(schema.kind("training.global_batch_size"), Some(Kind::Count));
        assert_eq!(
            schema.kind("parallelism.tensor_parallel_degree"),
            Some(Kind::Integer)
        );
        assert_eq!(schema.kind("optimizer.lr"), Some(Kind::Float));
        assert_eq!(schema.kind("model.initial_weights"), Some(Kind::Text));
        assert_eq!(
            schema.kind("parallelism.parameter_compression"),
            Some(Kind::OneOf(&["none", "int8", "fp8"]))
        );
        assert!(matches!(schema.kind("model.name"), Some(Kind::Open(_))));
        assert_eq!(schema.kind("training.step"), None);
        let sections = toml::Table::try_from(Config::default()).unwrap();
        // The sections of registered components have keys of their own.
        assert_eq!(schema.sections().count() + 1, sections.len());
    }

    #[test]
    fn every_default_has_the_type_of_its_key() {
        let defaults = toml::Table::try_from(Config::default()).unwrap();
        for (section, keys) in &defaults {
            for (key, value) in keys.as_table().unwrap() {
                let kind = Schema::get().kind(&format!("{section}.{key}")).unwrap();
                assert!(kind.accepts(value), "{section}.{key}");
            }
        }
    }
}
