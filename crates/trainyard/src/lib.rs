//! Trainyard: train one model on many machines. The library's face.
