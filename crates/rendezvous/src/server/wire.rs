//! Letters and answers as gRPC carries them: JSON in gRPC's frames, on one method with a stream each way.
//!
//! JSON, because the record is JSON too, in the file and in etcd, and a person can read all three.

use std::marker::PhantomData;

use prost::bytes::{Buf, BufMut};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tonic::Status;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};

/// The only method.
pub const ATTEND: &str = "/trainyard.Rendezvous/Attend";
/// No letter or answer is longer: the longest is a join with all its names.
pub const LONGEST_FRAME: usize = 32 * 1024;

/// Encodes `E`, decodes `D`.
pub struct Json<E, D>(PhantomData<fn(E) -> D>);

impl<E, D> Default for Json<E, D> {
    fn default() -> Self {
        Json(PhantomData)
    }
}

impl<E, D> Codec for Json<E, D>
where
    E: Serialize + Send + 'static,
    D: DeserializeOwned + Send + 'static,
{
    type Encode = E;
    type Decode = D;
    type Encoder = Json<E, D>;
    type Decoder = Json<E, D>;

    fn encoder(&mut self) -> Self::Encoder {
        Json::default()
    }

    fn decoder(&mut self) -> Self::Decoder {
        Json::default()
    }
}

impl<E: Serialize, D> Encoder for Json<E, D> {
    type Item = E;
    type Error = Status;

    fn encode(&mut self, item: E, into: &mut EncodeBuf<'_>) -> Result<(), Status> {
        serde_json::to_writer(into.writer(), &item)
            .map_err(|error| Status::internal(error.to_string()))
    }
}

impl<E, D: DeserializeOwned> Decoder for Json<E, D> {
    type Item = D;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<D>, Status> {
        let read = serde_json::from_reader(from.reader());
        read.map(Some)
            .map_err(|error| Status::invalid_argument(error.to_string()))
    }
}
