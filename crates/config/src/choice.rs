//! A component of a job: one that Trainyard has, or one that a program registers under a name.

use std::fmt;
use std::marker::PhantomData;

use serde::de::value::StrDeserializer;
use serde::de::{
    DeserializeOwned, Deserializer, EnumAccess, IntoDeserializer, VariantAccess, Visitor,
};
use serde::{Deserialize, Serialize, Serializer};

use crate::schema::{Kind, Schema};

/// The name under which the schema recognizes a choice.
pub(crate) const OPEN: &str = "Choice";

/// A built-in component, or the name of a registered one.
#[derive(Clone, PartialEq, Eq)]
pub enum Choice<T> {
    /// A component of Trainyard.
    Builtin(T),
    /// A component that the program registers under this name.
    Custom(String),
}

/// Its name, as in messages to users.
impl<T: fmt::Debug> fmt::Debug for Choice<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Choice::Builtin(builtin) => builtin.fmt(f),
            Choice::Custom(name) => f.write_str(name),
        }
    }
}

impl<T: DeserializeOwned> Choice<T> {
    /// The component of this name.
    pub fn named(name: &str) -> Choice<T> {
        let text: StrDeserializer<'_, serde::de::value::Error> = name.into_deserializer();
        match T::deserialize(text) {
            Ok(builtin) => Choice::Builtin(builtin),
            Err(_) => Choice::Custom(name.to_owned()),
        }
    }
}

impl<T> Choice<T> {
    /// The name of a registered component.
    pub fn custom(&self) -> Option<&str> {
        match self {
            Choice::Builtin(_) => None,
            Choice::Custom(name) => Some(name),
        }
    }
}

impl<T: Default> Default for Choice<T> {
    fn default() -> Self {
        Choice::Builtin(T::default())
    }
}

impl<T> From<T> for Choice<T> {
    fn from(builtin: T) -> Self {
        Choice::Builtin(builtin)
    }
}

impl<T: PartialEq> PartialEq<T> for Choice<T> {
    fn eq(&self, other: &T) -> bool {
        matches!(self, Choice::Builtin(builtin) if builtin == other)
    }
}

impl<T: Serialize> Serialize for Choice<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Choice::Builtin(builtin) => builtin.serialize(serializer),
            Choice::Custom(name) => serializer.serialize_str(name),
        }
    }
}

impl<'de, T: DeserializeOwned> Deserialize<'de> for Choice<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // As an enum, so that the schema learns the names of the built-in components.
        let Some(Kind::OneOf(variants)) = Schema::of::<T>("").0.kind("") else {
            return T::deserialize(deserializer).map(Choice::Builtin);
        };
        deserializer.deserialize_enum(OPEN, variants, ByName(PhantomData))
    }
}

struct ByName<T>(PhantomData<T>);

impl<'de, T: DeserializeOwned> Visitor<'de> for ByName<T> {
    type Value = Choice<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the name of a component")
    }

    fn visit_enum<A: EnumAccess<'de>>(self, access: A) -> Result<Self::Value, A::Error> {
        let (name, variant) = access.variant::<String>()?;
        variant.unit_variant()?;
        Ok(Choice::named(&name))
    }
}

#[cfg(test)]
mod tests {
    use crate::{Choice, Config, Names, OptimizerName};

    #[test]
    fn names_of_both_kinds_are_read_and_written() {
        let names = Names::builtin().with("optimizer.name", "Sophia");
        let read = |text: &str| Config::parse_with(text, &[], &names);
        let config = read("optimizer.name = \"SGD\"").unwrap();
        assert_eq!(config.optimizer.name, OptimizerName::Sgd);
        let config = read("optimizer.name = \"Sophia\"").unwrap();
        assert_eq!(config.optimizer.name, Choice::Custom("Sophia".to_owned()));
        assert_eq!(read(&config.to_toml().unwrap()).unwrap(), config);
        let error = read("optimizer.name = \"Sofia\"").unwrap_err().to_string();
        assert!(error.contains("(did you mean \"Sophia\"?)"), "{error}");
        Config::parse("optimizer.name = \"Sophia\"", &[]).unwrap_err();
        Config::parse_with("optimizer.name = \"Sophia\"", &[], &Names::any()).unwrap();
    }
}
