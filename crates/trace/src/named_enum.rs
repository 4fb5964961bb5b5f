//! A macro for enums whose variants can be listed, counted, printed and parsed by name.

/// Declares a fieldless enum whose variants have a name, an index and a serialized form.
macro_rules! named_enum {
    (
        $(#[$about:meta])*
        $what:literal
        $enum:ident { $($(#[$doc:meta])* $variant:ident = $name:literal,)+ }
    ) => {
        $(#[$about])*
        #[derive(
            Copy, Clone, Debug, Eq, PartialEq, Hash, Ord, PartialOrd,
            serde::Serialize, serde::Deserialize,
        )]
        pub enum $enum {
            $($(#[$doc])* #[serde(rename = $name)] $variant,)+
        }

        impl $enum {
            /// Every variant, in order.
            pub const ALL: [$enum; $enum::COUNT] = [$($enum::$variant,)+];

            /// The number of variants.
            pub const COUNT: usize = [$($name,)+].len();

            /// The name, as it is printed and serialized.
            pub const fn name(self) -> &'static str {
                match self { $($enum::$variant => $name,)+ }
            }

            /// The index in `ALL`.
            pub const fn index(self) -> usize {
                self as usize
            }
        }

        impl std::fmt::Display for $enum {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.name())
            }
        }

        impl std::str::FromStr for $enum {
            type Err = crate::TraceError;

            fn from_str(name: &str) -> Result<$enum, crate::TraceError> {
                $enum::ALL.into_iter().find(|each| each.name() == name).ok_or_else(|| {
                    crate::TraceError::UnknownName {
                        what: $what,
                        name: name.to_owned(),
                        known: $enum::ALL.map($enum::name).join(", "),
                    }
                })
            }
        }
    };
}

pub(crate) use named_enum;

#[cfg(test)]
mod tests {
    use crate::{CollectiveKind, MemoryKind, Purpose, SpanKind};

    #[test]
    fn names_round_trip() {
        for (index, kind) in CollectiveKind::ALL.into_iter().enumerate() {
            assert_eq!(kind.index(), index);
            assert_eq!(kind.name().parse::<CollectiveKind>().unwrap(), kind);
            assert_eq!(serde_json::to_value(kind).unwrap(), kind.name());
        }
        for purpose in Purpose::ALL {
            assert_eq!(purpose.to_string().parse::<Purpose>().unwrap(), purpose);
        }
        assert_eq!(MemoryKind::COUNT, 6);
        assert_eq!(format!("{:>9}|", SpanKind::Step), "     step|");
    }

    #[test]
    fn the_error_of_an_unknown_name_lists_the_valid_ones() {
        let error = "gradients".parse::<Purpose>().unwrap_err().to_string();
        assert!(
            error.contains("`gradients` is not a valid purpose"),
            "{error}"
        );
        assert!(error.contains("gradient, parameter"), "{error}");
    }
}
