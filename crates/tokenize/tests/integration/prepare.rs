//! The token files hold the tokenizer's tokens, for any number of threads and after interruptions.

use std::fs;
use std::path::{Path, PathBuf};

use tokenizers::Tokenizer;
use trainyard_tokenize::{Documents, INDEX_FILE, Index, Options, TokenizeError, prepare, verify};

/// A word-level tokenizer.
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

fn options(dir: &Path, inputs: &[(&str, String)]) -> Options {
    fs::write(dir.join("tokenizer.json"), TOKENIZER).unwrap();
    let write = |(name, text): &(&str, String)| -> PathBuf {
        let path = dir.join(name);
        fs::write(&path, text).unwrap();
        path
    };
    Options {
        documents: Documents::Line,
        inputs: inputs.iter().map(write).collect(),
        output: dir.join("tokens"),
        tokenizer: dir.join("tokenizer.json"),
        field: "text".to_owned(),
        end_of_document: Some("</s>".to_owned()),
        num_threads: 2,
    }
}

fn tokens(options: &Options) -> Vec<u16> {
    let index: Index =
        serde_json::from_slice(&fs::read(options.output.join(INDEX_FILE)).unwrap()).unwrap();
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
    let dir = tempfile::tempdir().unwrap();
    let inputs = [
        ("a.jsonl", lines(5)),
        ("b.txt", "two one\n\nthree".to_owned()),
    ];
    let options = options(dir.path(), &inputs);
    let summary = prepare(&options, &|_| ()).unwrap();
    assert_eq!((summary.num_documents, summary.num_files), (7, 2));
    let expected = [2, 2, 1, 3, 2, 1, 4, 2, 1, 0, 2, 1, 2, 3, 1, 3, 2, 1, 4, 1];
    assert_eq!(tokens(&options), expected);
    assert_eq!(summary.num_tokens, expected.len() as u64);
}

#[test]
fn a_file_is_a_document() {
    let dir = tempfile::tempdir().unwrap();
    let inputs = [
        ("a.txt", "two one\n\nthree\n".to_owned()),
        ("b.txt", "one\n".to_owned()),
        ("c.jsonl", lines(2)),
    ];
    let mut options = options(dir.path(), &inputs);
    options.documents = Documents::File;
    let summary = prepare(&options, &|_| ()).unwrap();
    assert_eq!((summary.num_documents, summary.num_files), (4, 2));
    let expected = [3, 2, 4, 1, 2, 1, 2, 2, 1, 3, 2, 1];
    assert_eq!(tokens(&options), expected);
}

#[test]
fn damaged_token_files_are_found() {
    let dir = tempfile::tempdir().unwrap();
    let options = options(dir.path(), &[("a.jsonl", lines(50))]);
    prepare(&options, &|_| ()).unwrap();
    let index = verify(&options.output, &|_| ()).unwrap();
    let file = options.output.join(&index.shards[0].file);
    let bytes = fs::read(&file).unwrap();
    for position in [0, 9, 20, 24, bytes.len() - 1] {
        let mut damaged = bytes.clone();
        damaged[position] ^= 1;
        fs::write(&file, damaged).unwrap();
        let error = verify(&options.output, &|_| ()).unwrap_err().to_string();
        assert!(error.contains(&index.shards[0].file), "{position}: {error}");
    }
    fs::write(&file, &bytes[..bytes.len() - 2]).unwrap();
    assert!(verify(&options.output, &|_| ()).is_err());
    fs::write(&file, &bytes).unwrap();
    assert!(verify(&options.output, &|_| ()).is_ok());
}

/// One input has several shards.
#[test]
fn output_is_independent_of_threads_and_an_interrupted_run_resumes() {
    let dir = tempfile::tempdir().unwrap();
    let inputs = [("a.jsonl", lines(700_000))];
    let mut options = options(dir.path(), &inputs);
    let first = prepare(&options, &|_| ()).unwrap();
    assert!(first.num_files > 1 && first.num_reused == 0, "{first:?}");
    let expected = tokens(&options);

    // One file is missing and another one is truncated.
    fs::remove_file(options.output.join("00000-00000.bin")).unwrap();
    let half = options.output.join("00000-00001.bin");
    let bytes = fs::read(&half).unwrap();
    fs::write(&half, &bytes[..bytes.len() / 2]).unwrap();
    options.num_threads = 1;
    let again = prepare(&options, &|_| ()).unwrap();
    assert_eq!(again.num_reused, first.num_files - 2);
    assert_eq!(again.num_tokens, first.num_tokens);
    assert_eq!(tokens(&options), expected);

    let tokenizer = Tokenizer::from_file(&options.tokenizer).unwrap();
    let last = tokenizer.encode_fast("four four", false).unwrap();
    let last: Vec<u16> = last.get_ids().iter().map(|&id| id as u16).collect();
    assert!(expected.len() > 1_000_000 && expected.ends_with(&[last, vec![1]].concat()));
}

/// Earlier builds wrote the shard size as `piece`: their directories are not mixed with ours.
#[test]
fn a_directory_of_an_earlier_build_is_rejected() {
    let dir = tempfile::tempdir().unwrap();
    let options = options(dir.path(), &[("a.jsonl", lines(3))]);
    prepare(&options, &|_| ()).unwrap();
    let settings = options.output.join("settings.json");
    let text = fs::read_to_string(&settings).unwrap();
    assert!(text.contains("\"shard_bytes\""));
    fs::write(&settings, text.replace("\"shard_bytes\"", "\"piece\"")).unwrap();
    let error = prepare(&options, &|_| ()).unwrap_err();
    assert!(
        matches!(error, TokenizeError::OtherSettings { .. }),
        "{error}"
    );
}

#[test]
fn other_settings_and_lines_without_text_are_rejected() {
    let dir = tempfile::tempdir().unwrap();
    let mut options = options(dir.path(), &[("a.jsonl", lines(3))]);
    prepare(&options, &|_| ()).unwrap();
    options.end_of_document = None;
    let error = prepare(&options, &|_| ()).unwrap_err();
    assert!(
        matches!(error, TokenizeError::OtherSettings { .. }),
        "{error}"
    );

    options.output = dir.path().join("other");
    options.field = "body".to_owned();
    let error = prepare(&options, &|_| ()).unwrap_err().to_string();
    assert!(
        error.contains("a.jsonl") && error.contains("--field"),
        "{error}"
    );
}
