//! Pickles written by hand, by Python and at random.

use proptest::prelude::*;

use super::*;
use crate::pytorch::pickle_value::from_pickle;

fn read(bytes: &[u8]) -> Result<serde_json::Value, PickleError> {
    from_pickle(&parse(bytes)?)
}

fn error_of(bytes: &[u8]) -> String {
    read(bytes).unwrap_err().to_string()
}

#[test]
fn everything_that_could_call_functions_is_rejected() {
    // os.system("ls"), with the opcodes of protocol 2.
    let error = error_of(b"\x80\x02cos\nsystem\nX\x02\0\0\0ls\x85R.");
    assert_eq!(
        error,
        "the pickle has the opcode GLOBAL (0x63) at offset 2, which plain data never needs"
    );
    let opcodes = [
        (b'R', "REDUCE"),
        (b'b', "BUILD"),
        (b'i', "INST"),
        (0x93, "STACK_GLOBAL"),
        (0x81, "NEWOBJ"),
    ];
    for (opcode, name) in opcodes {
        let error = error_of(&[0x80, 4, opcode, b'.']);
        assert!(error.contains(&format!("opcode {name} ")), "{error}");
    }
}

#[test]
fn damaged_pickles_are_rejected() {
    assert_eq!(
        error_of(b"\x80\x02]"),
        "the pickle ends early, after 3 bytes"
    );
    assert_eq!(
        error_of(b"\x80\x02X\xff\xff\xff\x7fa."),
        "the pickle is damaged at offset 2: BINUNICODE has too few bytes after it"
    );
    for bytes in [
        &b"\x80\x02."[..],
        b"\x80\x02a.",
        b"\x80\x02(N.",
        b"\x80\x02}(Nu.",
        b"\x80\x02h\x05.",
        b"\x80\x02Nq\x05.",
    ] {
        assert!(error_of(bytes).contains("damaged"), "{bytes:?}");
    }
    assert!(matches!(read(b"{}"), Err(PickleError::NoPickle)));
}

#[test]
fn lists_that_contain_themselves_are_rejected() {
    let error = error_of(b"\x80\x02]q\x00h\x00a.");
    assert_eq!(error, "the pickle is nested too deeply");
}

#[test]
fn values_that_double_are_rejected() {
    // Every list has the previous one twice.
    let mut bytes = b"\x80\x02]q\x00Na".to_vec();
    for id in 0..40 {
        bytes.extend([b'h', id, b'h', id, 0x86, b'q', id + 1]);
    }
    bytes.push(b'.');
    assert!(read(&bytes).is_err());
}

#[test]
fn deep_values_are_rejected() {
    let mut bytes = b"\x80\x02N".to_vec();
    bytes.extend([0x85; 1000]);
    bytes.push(b'.');
    assert!(read(&bytes).is_err());
}

#[test]
fn integers_have_at_most_64_bits() {
    let value = |bytes: &[u8]| read(&[b"\x80\x02\x8a", bytes, b"."].concat());
    assert_eq!(value(b"\x00").unwrap(), 0);
    assert_eq!(value(b"\x01\xff").unwrap(), -1);
    assert_eq!(
        value(b"\x09\xff\xff\xff\xff\xff\xff\xff\x7f\x00").unwrap(),
        i64::MAX
    );
    assert!(value(b"\x09\xff\xff\xff\xff\xff\xff\xff\xff\x00").is_err());
    assert!(value(b"\x09\0\0\0\0\0\0\0\0\x01").is_err());
}

#[test]
fn what_python_writes_is_what_it_wrote() {
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/pytorch");
    let json = std::fs::read(format!("{dir}/plain.json")).unwrap();
    let expected: serde_json::Value = serde_json::from_slice(&json).unwrap();
    for protocol in 2..=5 {
        let bytes = std::fs::read(format!("{dir}/plain{protocol}.pickle")).unwrap();
        assert_eq!(read(&bytes).unwrap(), expected, "protocol {protocol}");
    }
}

/// Plain data as JSON, without numbers that need more than 64 bits.
fn any_data() -> impl Strategy<Value = serde_json::Value> {
    let leaf = prop_oneof![
        Just(serde_json::Value::Null),
        any::<bool>().prop_map(Into::into),
        any::<i64>().prop_map(Into::into),
        ".{0,20}".prop_map(Into::into),
    ];
    leaf.prop_recursive(4, 40, 6, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..6).prop_map(Into::into),
            prop::collection::hash_map("[a-z]{1,8}", inner, 0..6)
                .prop_map(|map| serde_json::Value::Object(map.into_iter().collect())),
        ]
    })
}

/// Writes like PyTorch's C++ code, without a memo.
fn write(value: &serde_json::Value, out: &mut Vec<u8>) {
    match value {
        serde_json::Value::Null => out.push(b'N'),
        serde_json::Value::Bool(true) => out.push(0x88),
        serde_json::Value::Bool(false) => out.push(0x89),
        serde_json::Value::Number(number) => {
            out.extend([0x8a, 8]);
            out.extend(number.as_i64().unwrap_or(0).to_le_bytes());
        }
        serde_json::Value::String(text) => {
            out.push(b'X');
            out.extend((text.len() as u32).to_le_bytes());
            out.extend(text.as_bytes());
        }
        serde_json::Value::Array(items) => {
            out.extend(b"](");
            items.iter().for_each(|item| write(item, out));
            out.push(b'e');
        }
        serde_json::Value::Object(items) => {
            out.extend(b"}(");
            for (key, item) in items {
                write(&key.as_str().into(), out);
                write(item, out);
            }
            out.push(b'u');
        }
    }
}

/// Bytes of which most are opcodes that we know, so that they come further than random ones.
fn any_program() -> impl Strategy<Value = Vec<u8>> {
    let known = b"NKMJX])}tldaesuqrhj(.\x85\x86\x87\x88\x89\x8a\x8c\x94\x00\x01\x02";
    prop::collection::vec(prop::sample::select(&known[..]), 0..200)
}

proptest! {
    #[test]
    fn plain_data_round_trips(data in any_data()) {
        let mut bytes = b"\x80\x02".to_vec();
        write(&data, &mut bytes);
        bytes.push(b'.');
        prop_assert_eq!(read(&bytes).unwrap(), data);
    }

    #[test]
    fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = read(&[b"\x80\x02", &bytes[..]].concat());
    }

    #[test]
    fn arbitrary_programs_never_panic(program in any_program()) {
        let _ = read(&[b"\x80\x02", &program[..]].concat());
    }
}
