//! Text comes out as the tokenizer's own tokens, whoever did it and however often it was interrupted.

use std::fs;
use std::path::{Path, PathBuf};

use tokenizers::Tokenizer;
use trainyard_text::{INDEX, Index, Options, TextError, prepare};

/// A tokenizer of words.
const TOKENIZER: &str = r#"{
    "version": "1.0",
    "truncation": null, "padding": null, "normalizer": null, "post_processor": null, "decoder": null,
    "added_tokens": [],
    "pre_tokenizer": { "type": "Whitespace" },
    "model": {
        "type": "WordLevel",
        "vocab": { "<unk>": 0, "</s>": 1, "one": 2, "two": 3, "three": 4 },
        "unk_token": "<unk>"
    }
}"#;

fn options(folder: &Path, inputs: &[(&str, String)]) -> Options {
    fs::write(folder.join("tokenizer.json"), TOKENIZER).unwrap();
    let write = |(name, text): &(&str, String)| -> PathBuf {
        let path = folder.join(name);
        fs::write(&path, text).unwrap();
        path
    };
    Options {
        inputs: inputs.iter().map(write).collect(),
        output: folder.join("tokens"),
        tokenizer: folder.join("tokenizer.json"),
        field: "text".to_owned(),
        end_of_document: Some("</s>".to_owned()),
        num_threads: 2,
    }
}

fn tokens(options: &Options) -> Vec<u16> {
    let index: Index =
        serde_json::from_slice(&fs::read(options.output.join(INDEX)).unwrap()).unwrap();
    let files = index
        .shards
        .iter()
        .map(|shard| fs::read(options.output.join(&shard.file)).unwrap());
    let bytes: Vec<u8> = files.flat_map(|file| file[24..].to_vec()).collect();
    bytes
        .chunks(2)
        .map(|pair| u16::from_le_bytes([pair[0], pair[1]]))
        .collect()
}

fn lines(number: usize) -> String {
    let word = |i: usize| ["one", "two", "three", "four"][i % 4];
    let line = |i: usize| {
        format!(
            "{{\"text\": \"{} {}\", \"id\": {i}}}\n",
            word(i),
            word(i / 4)
        )
    };
    (0..number).map(line).collect()
}

#[test]
fn json_lines_and_plain_text_become_tokens() {
    let folder = tempfile::tempdir().unwrap();
    let inputs = [
        ("a.jsonl", lines(5)),
        ("b.txt", "two one\n\nthree".to_owned()),
    ];
    let options = options(folder.path(), &inputs);
    let summary = prepare(&options, &|_| ()).unwrap();
    assert_eq!((summary.num_documents, summary.num_files), (7, 2));
    let expected = [2, 2, 1, 3, 2, 1, 4, 2, 1, 0, 2, 1, 2, 3, 1, 3, 2, 1, 4, 1];
    assert_eq!(tokens(&options), expected);
    assert_eq!(summary.num_tokens, expected.len() as u64);
}

/// More than one piece of an input, on one thread and on many.
#[test]
fn threads_change_nothing_and_an_interrupted_run_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let inputs = [("a.jsonl", lines(700_000))];
    let mut options = options(folder.path(), &inputs);
    let first = prepare(&options, &|_| ()).unwrap();
    assert!(first.num_files > 1 && first.num_there == 0, "{first:?}");
    let expected = tokens(&options);

    // One file is missing, and of another there is only half.
    fs::remove_file(options.output.join("00000-00000.bin")).unwrap();
    let half = options.output.join("00000-00001.bin");
    let bytes = fs::read(&half).unwrap();
    fs::write(&half, &bytes[..bytes.len() / 2]).unwrap();
    options.num_threads = 1;
    let again = prepare(&options, &|_| ()).unwrap();
    assert_eq!(again.num_there, first.num_files - 2);
    assert_eq!(again.num_tokens, first.num_tokens);
    assert_eq!(tokens(&options), expected);

    let tokenizer = Tokenizer::from_file(&options.tokenizer).unwrap();
    let last = tokenizer.encode_fast("four four", false).unwrap();
    let last: Vec<u16> = last.get_ids().iter().map(|&id| id as u16).collect();
    assert!(expected.len() > 1_000_000 && expected.ends_with(&[last, vec![1]].concat()));
}

#[test]
fn other_settings_are_refused_and_so_are_lines_without_text() {
    let folder = tempfile::tempdir().unwrap();
    let mut options = options(folder.path(), &[("a.jsonl", lines(3))]);
    prepare(&options, &|_| ()).unwrap();
    options.end_of_document = None;
    let error = prepare(&options, &|_| ()).unwrap_err();
    assert!(matches!(error, TextError::OtherSettings { .. }), "{error}");

    options.output = folder.path().join("other");
    options.field = "body".to_owned();
    let error = prepare(&options, &|_| ()).unwrap_err().to_string();
    assert!(
        error.contains("a.jsonl") && error.contains("--field"),
        "{error}"
    );
}
