//! Parquet files give the same tokens as JSON lines of the same documents, for all writers and codecs.
//! Corrupted files are rejected by name.

use std::fs::{self, File};
use std::panic::catch_unwind;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parquet::basic::{Compression, Encoding, GzipLevel, ZstdLevel};
use parquet::data_type::{ByteArray, ByteArrayType, Int64Type};
use parquet::file::properties::{WriterProperties, WriterPropertiesBuilder, WriterVersion};
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use proptest::prelude::*;
use trainyard_tokenize::{Documents, INDEX_FILE, Index, Options, TokenizeError, prepare};

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

type Rows = Vec<Option<String>>;

/// Documents of many lengths, with duplicates, empty documents and null rows.
fn rows(number: usize) -> Rows {
    let words = ["one", "two", "three", "four", "größer"];
    let document = |i: usize| (0..i % 23).map(move |j| words[(i / 7 + j * j) % 5]);
    let row = |i: usize| (i % 11 != 3).then(|| document(i).collect::<Vec<_>>().join(" "));
    (0..number).map(row).collect()
}

fn json_lines(rows: &Rows) -> String {
    let texts = rows.iter().flatten();
    texts
        .map(|text| format!("{}\n", serde_json::json!({ "text": text })))
        .collect()
}

/// Writes rows, after a column of integers, in row groups of `group` rows.
fn write(path: &Path, rows: &Rows, group: usize, properties: WriterPropertiesBuilder) {
    let schema = "message rows { required int64 id; optional binary text (STRING); }";
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let properties = Arc::new(properties.build());
    let file = File::create(path).unwrap();
    let mut writer = SerializedFileWriter::new(file, schema, properties).unwrap();
    for rows in rows.chunks(group) {
        let mut group = writer.next_row_group().unwrap();
        let ids: Vec<i64> = (0..rows.len() as i64).collect();
        let mut column = group.next_column().unwrap().unwrap();
        let numbers = column.typed::<Int64Type>();
        numbers.write_batch(&ids, None, None).unwrap();
        column.close().unwrap();
        let levels: Vec<i16> = rows.iter().map(|row| i16::from(row.is_some())).collect();
        let texts = rows.iter().flatten().map(|text| text.as_str().into());
        let texts: Vec<ByteArray> = texts.collect();
        let mut column = group.next_column().unwrap().unwrap();
        let bytes = column.typed::<ByteArrayType>();
        bytes.write_batch(&texts, Some(&levels), None).unwrap();
        column.close().unwrap();
        group.close().unwrap();
    }
    writer.close().unwrap();
}

fn options(dir: &Path, input: PathBuf, output: &str) -> Options {
    fs::write(dir.join("tokenizer.json"), TOKENIZER).unwrap();
    Options {
        documents: Documents::Line,
        inputs: vec![input],
        output: dir.join(output),
        tokenizer: dir.join("tokenizer.json"),
        field: "text".to_owned(),
        end_of_document: Some("</s>".to_owned()),
        num_threads: 2,
    }
}

fn tokens(options: &Options) -> Vec<u8> {
    let index = fs::read(options.output.join(INDEX_FILE)).unwrap();
    let index: Index = serde_json::from_slice(&index).unwrap();
    let read = |file: &String| fs::read(options.output.join(file)).unwrap()[24..].to_vec();
    let files = index.shards.iter().map(|shard| &shard.file);
    files.flat_map(read).collect()
}

/// The tokens of the same documents as JSON lines.
fn expected(dir: &Path, rows: &Rows) -> (Vec<u8>, u64) {
    let path = dir.join("rows.jsonl");
    fs::write(&path, json_lines(rows)).unwrap();
    let options = options(dir, path, "expected");
    let summary = prepare(&options, &|_| ()).unwrap();
    (tokens(&options), summary.num_documents)
}

#[test]
fn tokens_equal_those_of_json_lines_for_every_codec() {
    let dir = tempfile::tempdir().unwrap();
    let rows = rows(5000);
    let (expected, num_documents) = expected(dir.path(), &rows);
    let gzip = Compression::GZIP(GzipLevel::default());
    let zstd = Compression::ZSTD(ZstdLevel::default());
    let codecs = [
        Compression::UNCOMPRESSED,
        Compression::SNAPPY,
        gzip,
        zstd,
        Compression::LZ4_RAW,
    ];
    for (number, compression) in codecs.into_iter().enumerate() {
        for (version, has_dictionary) in [(1, false), (1, true), (2, false), (2, true)] {
            let properties = WriterProperties::builder()
                .set_compression(compression)
                .set_dictionary_enabled(has_dictionary)
                .set_dictionary_page_size_limit(4096)
                .set_data_page_size_limit(8192)
                .set_write_batch_size(100)
                .set_encoding(Encoding::PLAIN)
                .set_writer_version(match version {
                    1 => WriterVersion::PARQUET_1_0,
                    _ => WriterVersion::PARQUET_2_0,
                });
            let name = format!("{number}-{version}-{has_dictionary}");
            let path = dir.path().join(format!("{name}.parquet"));
            write(&path, &rows, 1300, properties);
            let options = options(dir.path(), path.clone(), &name);
            let done = AtomicU64::new(0);
            let summary = prepare(&options, &|bytes| {
                done.fetch_add(bytes, Ordering::Relaxed);
            });
            let summary = summary.unwrap();
            assert_eq!(tokens(&options), expected, "{name}");
            assert_eq!(
                (summary.num_files, summary.num_documents),
                (4, num_documents)
            );
            // The progress reports add up to the file's size.
            assert_eq!(done.into_inner(), fs::metadata(&path).unwrap().len());
        }
    }
}

#[test]
fn an_interrupted_run_resumes() {
    let dir = tempfile::tempdir().unwrap();
    let rows = rows(4000);
    let (expected, _) = expected(dir.path(), &rows);
    let path = dir.path().join("rows.parquet");
    write(&path, &rows, 500, WriterProperties::builder());
    let mut options = options(dir.path(), path, "tokens");
    let first = prepare(&options, &|_| ()).unwrap();
    assert_eq!((first.num_files, first.num_reused), (8, 0));

    // The state after a kill: some files are missing, one is truncated, one has its temporary name.
    for gone in ["00000-00002.bin", "00000-00007.bin", INDEX_FILE] {
        fs::remove_file(options.output.join(gone)).unwrap();
    }
    fs::write(options.output.join("00000-00007.bin.partial"), "half").unwrap();
    let half = options.output.join("00000-00004.bin");
    let bytes = fs::read(&half).unwrap();
    fs::write(&half, &bytes[..bytes.len() / 2]).unwrap();
    options.num_threads = 1;
    let again = prepare(&options, &|_| ()).unwrap();
    assert_eq!((again.num_files, again.num_reused), (8, 5));
    assert_eq!(again.num_tokens, first.num_tokens);
    assert_eq!(tokens(&options), expected);
}

/// All string types of Arrow: plain, large, dictionary-encoded, views.
#[test]
fn files_of_pyarrow_are_read() {
    let python = std::env::var("TRAINYARD_PYTHON").unwrap_or("python3".into());
    let has_pyarrow = Command::new(&python)
        .args(["-c", "import pyarrow"])
        .output();
    if !has_pyarrow.is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: {python} has no pyarrow");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let rows = rows(3000);
    let (expected, _) = expected(dir.path(), &rows);
    fs::write(
        dir.path().join("rows.json"),
        serde_json::json!(rows).to_string(),
    )
    .unwrap();
    let program = "
import json, sys, pyarrow as pa, pyarrow.parquet as pq
rows = json.load(open('rows.json'))
text = pa.array(rows, pa.string())
types = {'string': text, 'large_string': text.cast(pa.large_string()),
         'dictionary': text.dictionary_encode(), 'string_view': text.cast(pa.string_view())}
for name, column in types.items():
    table = pa.table({'id': list(range(len(rows))), 'text': column})
    for codec in ['none', 'snappy', 'gzip', 'zstd', 'lz4']:
        for version in ['1.0', '2.0']:
            pq.write_table(table, f'{name}-{codec}-{version}.parquet', compression=codec,
                           row_group_size=700, data_page_version=version, data_page_size=8192)
";
    let written = Command::new(&python)
        .args(["-c", program])
        .current_dir(dir.path())
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&written.stderr);
    assert!(written.status.success(), "{stderr}");
    let mut num_files = 0;
    for entry in fs::read_dir(dir.path()).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|x| x == "parquet") {
            let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
            let options = options(dir.path(), path, &name);
            prepare(&options, &|_| ()).unwrap();
            assert_eq!(tokens(&options), expected, "{name}");
            num_files += 1;
        }
    }
    assert_eq!(num_files, 40);
}

#[test]
fn other_columns_and_unsupported_encodings_are_rejected() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("rows.parquet");
    write(&path, &rows(50), 50, WriterProperties::builder());
    let mut options = options(dir.path(), path.clone(), "tokens");
    for (field, expected) in [
        ("body", "no column \"body\""),
        ("id", "\"id\" is not a string column"),
    ] {
        options.field = field.to_owned();
        let error = prepare(&options, &|_| ()).unwrap_err();
        assert!(matches!(error, TokenizeError::Parquet { .. }), "{error}");
        let error = error.to_string();
        let expected = ["rows.parquet", expected, "--field"];
        assert!(expected.iter().all(|text| error.contains(text)), "{error}");
    }
    let delta = WriterProperties::builder()
        .set_dictionary_enabled(false)
        .set_column_encoding("text".into(), Encoding::DELTA_BYTE_ARRAY);
    write(&path, &rows(50), 50, delta);
    options.field = "text".to_owned();
    let error = prepare(&options, &|_| ()).unwrap_err().to_string();
    assert!(
        error.contains("DELTA_BYTE_ARRAY is not supported"),
        "{error}"
    );
}

/// A page of one repeated character compresses a thousand times: small pages are accepted, large ones not.
#[test]
fn decompression_bombs_are_rejected() {
    let dir = tempfile::tempdir().unwrap();
    for (mebibytes, is_read) in [(3, true), (30, false)] {
        let path = dir.path().join(format!("{mebibytes}.parquet"));
        let rows = vec![Some("a".repeat(mebibytes << 20))];
        let zstd = Compression::ZSTD(ZstdLevel::default());
        write(
            &path,
            &rows,
            1,
            WriterProperties::builder().set_compression(zstd),
        );
        let options = options(dir.path(), path, &mebibytes.to_string());
        let found = prepare(&options, &|_| ()).map_err(|e| e.to_string());
        assert_eq!(found.is_ok(), is_read, "{found:?}");
        assert!(is_read || found.unwrap_err().contains("64 times"));
    }
}

fn small_file(dir: &Path, compression: u8) -> Vec<u8> {
    let compression = match compression {
        0 => Compression::UNCOMPRESSED,
        1 => Compression::SNAPPY,
        2 => Compression::GZIP(GzipLevel::default()),
        3 => Compression::ZSTD(ZstdLevel::default()),
        _ => Compression::LZ4_RAW,
    };
    let properties = WriterProperties::builder().set_compression(compression);
    let path = dir.join("small.parquet");
    write(&path, &rows(100), 40, properties);
    fs::read(path).unwrap()
}

/// Whether the bytes are rejected; checks that the error names the file and that nothing panics.
fn is_rejected(dir: &Path, bytes: &[u8]) -> bool {
    let path = dir.join("corrupted.parquet");
    fs::write(&path, bytes).unwrap();
    let output = dir.join("corrupted");
    let _ = fs::remove_dir_all(&output);
    let options = options(dir, path, "corrupted");
    let prepared = catch_unwind(|| prepare(&options, &|_| ())).expect("no panic");
    if let Err(error) = &prepared {
        assert!(matches!(error, TokenizeError::Parquet { .. }), "{error:?}");
        assert!(error.to_string().contains("corrupted.parquet"), "{error}");
    }
    prepared.is_err()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn truncated_files_are_rejected(compression in 0u8..5, at in any::<prop::sample::Index>()) {
        let dir = tempfile::tempdir().unwrap();
        let bytes = small_file(dir.path(), compression);
        prop_assert!(is_rejected(dir.path(), &bytes[..at.index(bytes.len())]));
    }

    /// Parquet has no checksum here, so a flipped bit may change a character; it never does more harm.
    #[test]
    fn flipped_bits_never_panic(
        compression in 0u8..5,
        flips in prop::collection::vec((any::<prop::sample::Index>(), 0u8..8), 1..6),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let mut bytes = small_file(dir.path(), compression);
        for (at, bit) in flips {
            let at = at.index(bytes.len());
            bytes[at] ^= 1 << bit;
        }
        is_rejected(dir.path(), &bytes);
    }
}
