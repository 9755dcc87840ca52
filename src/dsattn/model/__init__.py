"""Whole models made of the layers in `nn`."""

from dsattn.model.decoder import Decoder, DecoderOutput

__all__ = ["Decoder", "DecoderOutput"]
