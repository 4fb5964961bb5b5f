//! The configs of the repository's `configs` folder, for people who have installed only the programs.

use toml::Table;

use crate::failure::Failure;

macro_rules! examples {
    ($($name:literal)*) => {
        /// Name and text of each.
        const EXAMPLES: &[(&str, &str)] = &[
            $(($name, include_str!(concat!("../../../../configs/", $name, ".toml")))),*
        ];
    };
}

// All but those that name other files of the repository.
examples! {
    "cnn" "encoder" "llama-small" "llama-tiny" "llama-tiny-3d" "llama-tiny-cp" "llama-tiny-tp" "llama3.2-1b" "llama3-405b"
    "llama3-70b" "llama3-8b" "mixtral-8x7b" "mnist" "small_moe" "tiny_moe" "vit"
}

/// The example of this name as TOML; without a name, a list of all.
pub(super) fn example(name: &str) -> Result<String, Failure> {
    if name.is_empty() {
        return Ok(list());
    }
    let found = EXAMPLES.iter().find(|(other, _)| *other == name);
    found.map(|(_, text)| (*text).to_owned()).ok_or_else(|| {
        let names: Vec<&str> = EXAMPLES.iter().map(|(name, _)| *name).collect();
        Failure::usage(format!("there is no example {name}"))
            .hint(format!("the examples are {}", names.join(", ")))
    })
}

fn list() -> String {
    let lines = EXAMPLES
        .iter()
        .map(|(name, text)| format!("{name:14} {}\n", description(text)));
    lines.collect()
}

/// The setting `job.description`.
fn description(text: &str) -> String {
    let config: Option<Table> = text.parse().ok();
    let description =
        config.and_then(|config| Some(config.get("job")?.get("description")?.as_str()?.to_owned()));
    description.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn examples_need_no_other_file_and_none_is_forgotten() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs");
        for entry in folder.read_dir().unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_none_or(|extension| extension != "toml") {
                continue;
            }
            let text = std::fs::read_to_string(&path).unwrap();
            let stem = path.file_stem().unwrap().to_str().unwrap();
            let names_a_folder = text.contains("hf_assets_path");
            assert_eq!(example(stem).is_err(), names_a_folder, "{stem}");
            assert!(!description(&text).is_empty(), "{stem}");
        }
        assert_eq!(list().lines().count(), EXAMPLES.len());
    }
}
