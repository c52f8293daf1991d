//! The consumer against real producers.
