//! TensorBoard event records: protobuf messages, each framed by its length and checksums.
//!
//! Only the fields of scalar summaries are written: wall time, step, and tags with values.

/// The version in the first record of every file.
pub(super) const FILE_VERSION: &str = "brain.Event:2";

/// Wire types of protobuf.
const VARINT: u8 = 0;
const FIXED64: u8 = 1;
const BYTES: u8 = 2;
const FIXED32: u8 = 5;

/// `Event { wall_time, file_version }`
pub(super) fn version_event(wall_time: f64) -> Vec<u8> {
    let mut event = Vec::new();
    field(&mut event, 1, FIXED64, &wall_time.to_le_bytes());
    message(&mut event, 3, FILE_VERSION.as_bytes());
    event
}

/// `Event { wall_time, step, summary { value { tag, simple_value }.. } }`
pub(super) fn scalars_event(wall_time: f64, step: u64, scalars: &[(&str, f64)]) -> Vec<u8> {
    let mut summary = Vec::new();
    for &(tag, value) in scalars {
        let mut entry = Vec::new();
        message(&mut entry, 1, tag.as_bytes());
        field(&mut entry, 2, FIXED32, &(value as f32).to_le_bytes());
        message(&mut summary, 1, &entry);
    }
    let mut event = Vec::new();
    field(&mut event, 1, FIXED64, &wall_time.to_le_bytes());
    field(&mut event, 2, VARINT, &varint(step));
    message(&mut event, 5, &summary);
    event
}

/// A record in TFRecord framing: length, checksum of the length, data, checksum of the data.
pub(super) fn framed(data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u64).to_le_bytes();
    let mut record = Vec::with_capacity(data.len() + 16);
    record.extend(length);
    record.extend(checksum(&length).to_le_bytes());
    record.extend(data);
    record.extend(checksum(data).to_le_bytes());
    record
}

/// Masked CRC-32C: a plain CRC of data that contains CRCs would be weak.
fn checksum(data: &[u8]) -> u32 {
    crc32c::crc32c(data)
        .rotate_right(15)
        .wrapping_add(0xa282_ead8)
}

fn message(out: &mut Vec<u8>, number: u8, bytes: &[u8]) {
    let mut content = varint(bytes.len() as u64);
    content.extend(bytes);
    field(out, number, BYTES, &content);
}

/// Writes a field. Its number must be below 16, so that the key is one byte.
fn field(out: &mut Vec<u8>, number: u8, wire_type: u8, content: &[u8]) {
    out.push(number << 3 | wire_type);
    out.extend(content);
}

/// A protobuf varint: seven bits per byte, the lowest first.
fn varint(mut value: u64) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(10);
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
    bytes
}
