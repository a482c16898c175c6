"""apportion"""
