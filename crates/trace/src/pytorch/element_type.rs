//! PyTorch's element types.

/// An element type: PyTorch's name in dumps and traces, our name, and its size in bytes.
const TYPES: [(&str, &str, u64); 21] = [
    ("Float", "float32", 4),
    ("BFloat16", "bfloat16", 2),
    ("Half", "float16", 2),
    ("Double", "float64", 8),
    ("Long", "int64", 8),
    ("Int", "int32", 4),
    ("Short", "int16", 2),
    ("Char", "int8", 1),
    ("Byte", "uint8", 1),
    ("Bool", "bool", 1),
    ("UInt16", "uint16", 2),
    ("UInt32", "uint32", 4),
    ("UInt64", "uint64", 8),
    ("Float8_e4m3fn", "float8_e4m3fn", 1),
    ("Float8_e4m3fnuz", "float8_e4m3fnuz", 1),
    ("Float8_e5m2", "float8_e5m2", 1),
    ("Float8_e5m2fnuz", "float8_e5m2fnuz", 1),
    ("Float8_e8m0fnu", "float8_e8m0fnu", 1),
    ("ComplexHalf", "complex32", 4),
    ("ComplexFloat", "complex64", 8),
    ("ComplexDouble", "complex128", 16),
];

/// The types that the profiler names as C++ does, where it records shapes.
const CPP_NAMES: [(&str, &str); 10] = [
    ("float", "Float"),
    ("c10::BFloat16", "BFloat16"),
    ("c10::Half", "Half"),
    ("double", "Double"),
    ("long int", "Long"),
    ("int", "Int"),
    ("short int", "Short"),
    ("signed char", "Char"),
    ("unsigned char", "Byte"),
    ("bool", "Bool"),
];

/// Our name for an element type. A type that is not known keeps PyTorch's name.
pub(super) fn name(torch: &str) -> &str {
    entry(torch).map_or(torch, |(_, name, _)| name)
}

/// The bytes of one element; 0 if the type is not known.
pub(super) fn size(torch: &str) -> u64 {
    entry(torch).map_or(0, |(_, _, size)| size)
}

/// The bytes of a tensor. Sizes come from files, and the result of nonsense is as good as any other.
pub(super) fn tensor_bytes(sizes: &[i64], torch: &str) -> u64 {
    sizes
        .iter()
        .map(|&size| u64::try_from(size).unwrap_or(0))
        .fold(size(torch), u64::saturating_mul)
}

fn entry(torch: &str) -> Option<(&'static str, &'static str, u64)> {
    let in_cpp = CPP_NAMES.iter().find(|(cpp, _)| *cpp == torch);
    let torch = in_cpp.map_or(torch, |(_, torch)| torch);
    TYPES.iter().find(|(each, ..)| *each == torch).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_have_our_names_and_their_sizes() {
        assert_eq!((name("BFloat16"), size("BFloat16")), ("bfloat16", 2));
        assert_eq!((name("float"), size("float")), ("float32", 4));
        assert_eq!((name("QInt8"), size("QInt8")), ("QInt8", 0));
        assert_eq!(tensor_bytes(&[3, 5], "Half"), 30);
        assert_eq!(tensor_bytes(&[], "Float"), 4);
        assert_eq!(tensor_bytes(&[i64::MAX, i64::MAX, -1], "Float"), 0);
    }
}
