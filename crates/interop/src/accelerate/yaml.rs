//! Parses YAML.

use serde_json::Value;

/// The limits of a config, which is a page of scalars; hostile files repeat anchors.
const MAX_BYTES: usize = 256 << 10;
const MAX_NODES: usize = 10_000;
const MAX_DEPTH: usize = 16;

/// The values of a YAML file.
pub(in super::super) fn parse(text: &str) -> Result<Value, String> {
    if text.len() > MAX_BYTES {
        return Err(format!("the file is larger than {MAX_BYTES} bytes"));
    }
    let options = serde_saphyr::options! {
        // Quoted or not, `no` is a value of mixed_precision.
        strict_booleans: true,
        with_snippet: false,
        budget: serde_saphyr::budget! {
            max_depth: MAX_DEPTH,
            max_nodes: MAX_NODES,
        },
    };
    serde_saphyr::from_str_with_options(text, options).map_err(|error| error.to_string())
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
        assert!(parse(&"a".repeat(MAX_BYTES + 1)).is_err());
    }

    proptest! {
        #[test]
        fn never_panics(text in "[a-c:\\-&*!|> \\n'\"\\[\\]{},0-9]{0,80}") {
            let _ = parse(&text);
        }
    }
}
