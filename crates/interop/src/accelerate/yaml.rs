//! Parses YAML: one document of mappings, sequences and scalars, without aliases.

use granit_parser::{Event, Parser, ScalarStyle, StrInput};
use serde_json::{Map, Number, Value};

/// The limits of a config, which is a page of scalars.
const MAX_BYTES: usize = 256 << 10;
const MAX_DEPTH: usize = 16;

/// The values of a YAML file.
pub(in super::super) fn parse(text: &str) -> Result<Value, String> {
    if text.len() > MAX_BYTES {
        return Err(format!("the file is larger than {MAX_BYTES} bytes"));
    }
    let mut reader = Reader {
        events: Parser::new_from_str(text),
    };
    reader.document()
}

/// Builds values from the events of the parser.
struct Reader<'a> {
    events: Parser<'a, StrInput<'a>>,
}

impl<'a> Reader<'a> {
    /// The only document; null if there is none.
    fn document(&mut self) -> Result<Value, String> {
        let mut document = None;
        loop {
            match self.event()? {
                Event::StreamStart | Event::DocumentEnd => {}
                Event::StreamEnd => return Ok(document.unwrap_or_default()),
                Event::DocumentStart(..) if document.is_none() => {
                    let first = self.event()?;
                    document = Some(self.node(first, 0)?);
                }
                _ => return Err("the file has more than one document".to_owned()),
            }
        }
    }

    fn event(&mut self) -> Result<Event<'a>, String> {
        let event = self.events.next_event();
        let event = event.ok_or_else(|| "the file ends too early".to_owned())?;
        event
            .map(|(event, _)| event)
            .map_err(|error| error.to_string())
    }

    /// The value that begins with an event. Nothing is read twice, so the value is not larger than the file.
    fn node(&mut self, first: Event<'a>, depth: usize) -> Result<Value, String> {
        if depth > MAX_DEPTH {
            return Err(format!("values are nested more than {MAX_DEPTH} deep"));
        }
        match first {
            Event::Scalar(text, ScalarStyle::Plain, _, None) => Ok(plain(&text)),
            Event::Scalar(text, ..) => Ok(Value::String(text.into_owned())),
            Event::SequenceStart(..) => self.sequence(depth),
            Event::MappingStart(..) => self.mapping(depth),
            _ => Err("aliases are not supported: write the value out".to_owned()),
        }
    }

    fn sequence(&mut self, depth: usize) -> Result<Value, String> {
        let mut values = Vec::new();
        loop {
            match self.event()? {
                Event::SequenceEnd => return Ok(Value::Array(values)),
                first => values.push(self.node(first, depth + 1)?),
            }
        }
    }

    fn mapping(&mut self, depth: usize) -> Result<Value, String> {
        let mut values = Map::new();
        loop {
            let key = match self.event()? {
                Event::MappingEnd => return Ok(Value::Object(values)),
                Event::Scalar(key, ..) => key.into_owned(),
                _ => return Err("a key is not a scalar".to_owned()),
            };
            let first = self.event()?;
            let value = self.node(first, depth + 1)?;
            if values.insert(key.clone(), value).is_some() {
                return Err(format!("the key `{key}` occurs twice"));
            }
        }
    }
}

/// The value of a scalar without quotes, by the core schema of YAML 1.2. So `no` is a string: it is a value of
/// `mixed_precision`.
fn plain(text: &str) -> Value {
    let is_numeric =
        text.starts_with(|first: char| first.is_ascii_digit() || "+-.".contains(first));
    let integer = || text.parse::<i64>().ok().map(Number::from);
    let float = || text.parse::<f64>().ok().and_then(Number::from_f64);
    match text {
        "" | "~" | "null" | "Null" | "NULL" => Value::Null,
        "true" | "True" | "TRUE" => Value::Bool(true),
        "false" | "False" | "FALSE" => Value::Bool(false),
        _ if is_numeric => integer()
            .or_else(float)
            .map_or_else(|| Value::String(text.to_owned()), Value::Number),
        _ => Value::String(text.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::proptest;
    use serde_json::json;

    use super::*;

    #[test]
    fn scalars_have_their_types() {
        let text = "a: 'no'\nb: no\nc: true\nd: 3\ne: 1.5\nf:\n  g: []\n  h: null\n";
        let expected = json!({
            "a": "no", "b": "no", "c": true, "d": 3, "e": 1.5, "f": {"g": [], "h": null}
        });
        assert_eq!(parse(text), Ok(expected));
        let words = "[-inf, .5, 1.2.3, 10:30, +7, ~, True, 'null', !!str 3, a b]";
        let expected = json!([
            "-inf", 0.5, "1.2.3", "10:30", 7, null, true, "null", "3", "a b"
        ]);
        assert_eq!(parse(words), Ok(expected));
        assert_eq!(parse(""), Ok(Value::Null));
        assert_eq!(parse("# nothing\n---\n"), Ok(Value::Null));
    }

    #[test]
    fn hostile_files_are_rejected() {
        let mut bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n".to_owned();
        for level in 1..9 {
            let alias = format!("*a{}", level - 1);
            let list = vec![alias; 10].join(", ");
            bomb += &format!("a{level}: &a{level} [{list}]\n");
        }
        assert!(parse(&bomb).is_err());
        assert!(parse(&"[".repeat(100_000)).is_err());
        assert!(parse("a: 1\na: 2\n").is_err());
        assert!(parse("a: 1\n---\nb: 2\n").is_err());
        assert!(parse("? [a]\n: 1\n").is_err());
        assert!(parse(&"a".repeat(MAX_BYTES + 1)).is_err());
    }

    proptest! {
        #[test]
        fn never_panics(text in "[a-c:\\-&*!|> \\n'\"\\[\\]{},0-9]{0,80}") {
            let _ = parse(&text);
        }
    }
}
