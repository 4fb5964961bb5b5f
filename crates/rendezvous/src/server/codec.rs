//! The gRPC encoding of requests and responses: JSON in gRPC frames, on one bidirectional streaming method.
//!
//! JSON, because the run state is JSON too, in the record file and in etcd, and people can read all three.

use std::marker::PhantomData;

use prost::bytes::{Buf, BufMut};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tonic::Status;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};

/// The version of the protocol, which is part of [`SESSION_METHOD`].
pub const PROTOCOL_VERSION: u32 = 2;
/// The only gRPC method of the server: the session of one agent.
pub const SESSION_METHOD: &str = "/trainyard.rendezvous.v2.Rendezvous/Session";
/// The maximum size of a message. The largest one is a join with all its names.
pub const MAX_FRAME_BYTES: usize = 32 * 1024;

/// A codec that encodes `E` and decodes `D`.
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
        let written = serde_json::to_vec(&item);
        into.put(
            written
                .map_err(|error| Status::internal(error.to_string()))?
                .as_slice(),
        );
        Ok(())
    }
}

impl<E, D: DeserializeOwned> Decoder for Json<E, D> {
    type Item = D;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<D>, Status> {
        // As everywhere in this crate, from a slice: the parsers of a reader would be compiled as well.
        let read = serde_json::from_slice(&from.copy_to_bytes(from.remaining()));
        read.map(Some)
            .map_err(|error| Status::invalid_argument(error.to_string()))
    }
}
