//! Raw tensor bytes to a file and back.

use std::fs::File;
use std::io::{self, ErrorKind};

use trainyard_torch::{Device, Kind, Tensor, bytes, meta, storage};

fn file() -> File {
    tempfile::tempfile().unwrap()
}

fn numbers(count: i64, kind: Kind) -> Tensor {
    Tensor::arange(count, (kind, Device::Cpu))
}

#[test]
fn every_dtype_round_trips_bit_for_bit() -> io::Result<()> {
    for kind in [
        Kind::Uint8,
        Kind::Half,
        Kind::BFloat16,
        Kind::Float,
        Kind::Double,
        Kind::Int64,
    ] {
        let file = file();
        let there = numbers(100, kind).reshape([4, 25]);
        let back = Tensor::zeros_like(&there);
        bytes::write_at(&file, 13, &there)?;
        let num_bytes = 100 * kind.elt_size_in_bytes() as u64;
        assert_eq!(file.metadata()?.len(), 13 + num_bytes, "{kind:?}");
        bytes::read_at(&file, 13, &back)?;
        assert!(back.equal(&there), "{kind:?}");
        assert_eq!(bytes::checksum(&back)?, bytes::checksum(&there)?);
    }
    Ok(())
}

#[test]
fn a_view_reads_and_writes_only_its_own_elements() -> io::Result<()> {
    let file = file();
    bytes::write_at(&file, 0, &numbers(10, Kind::Float).narrow(0, 3, 4))?;
    let full = Tensor::zeros([10], (Kind::Float, Device::Cpu));
    bytes::read_at(&file, 0, &full.narrow(0, 5, 4))?;
    let expected = Tensor::from_slice(&[0f32, 0., 0., 0., 0., 3., 4., 5., 6., 0.]);
    assert!(full.equal(&expected));
    bytes::zero(&full.narrow(0, 5, 2))?;
    let expected = Tensor::from_slice(&[0f32, 0., 0., 0., 0., 0., 0., 5., 6., 0.]);
    assert!(full.equal(&expected));
    Ok(())
}

#[test]
fn an_empty_tensor_reads_and_writes_nothing() -> io::Result<()> {
    let file = file();
    let empty = Tensor::zeros([0], (Kind::Float, Device::Cpu));
    bytes::write_at(&file, 7, &empty)?;
    bytes::read_at(&file, 7, &empty)?;
    assert_eq!(file.metadata()?.len(), 0);
    Ok(())
}

#[test]
fn tensors_without_contiguous_host_memory_are_rejected() {
    let transposed = numbers(6, Kind::Float).reshape([2, 3]).tr();
    let without_memory = meta::empty(&[6], Kind::Float).unwrap();
    let sparse = numbers(6, Kind::Float).to_sparse_sparse_dim(1);
    let released = numbers(6, Kind::Float);
    let view = released.narrow(0, 2, 3);
    storage::release(&released).unwrap();
    let file = file();
    for (name, tensor) in [
        ("transposed", &transposed),
        ("meta", &without_memory),
        ("sparse", &sparse),
        ("released", &released),
        ("view of released", &view),
    ] {
        for rejected in [
            bytes::read_at(&file, 0, tensor),
            bytes::write_at(&file, 0, tensor),
            bytes::checksum(tensor).map(drop),
            bytes::zero(tensor),
        ] {
            let kind = rejected.expect_err(name).kind();
            assert_eq!(kind, ErrorKind::InvalidInput, "{name}");
        }
    }
}

#[test]
fn a_file_that_ends_early_is_an_error() -> io::Result<()> {
    let file = file();
    bytes::write_at(&file, 0, &numbers(9, Kind::Float))?;
    let short = bytes::read_at(&file, 0, &numbers(10, Kind::Float));
    assert_eq!(short.unwrap_err().kind(), ErrorKind::UnexpectedEof);
    Ok(())
}
